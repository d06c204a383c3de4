"""Policies that the planner's are compared with, and that nobody needs for a plan."""
