"""Figures and decisions of a training, from step to step."""
