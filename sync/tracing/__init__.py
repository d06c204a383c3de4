"""Recordings of trainings: steps are measured while training goes on, and become a trace for the planner."""

from .model_tracing import ModelTracing, trace_model

__all__ = ["ModelTracing", "trace_model"]
