"""Proposals of plans from predictions: a recording of the model, a profile of the machine, and the planner."""
