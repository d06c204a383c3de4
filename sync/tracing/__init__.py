"""Recordings of trainings: steps are measured while training goes on, and become a trace for the planner."""
