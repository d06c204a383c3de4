"""Planner: predicts the time of a training step without running it. Imports only programs and plans."""
