"""Checks of models, optimizers and settings of the training."""
