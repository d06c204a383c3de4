"""Measurements of the planner."""
