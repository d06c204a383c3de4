"""Planner: what a step takes, without running it. Imports programs and plans alone."""
