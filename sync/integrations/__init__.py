"""Trainers that attach compression: one module for each package, which it alone imports."""
