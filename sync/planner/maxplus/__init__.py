"""Estimates of steps by max-plus algebra, for many options at once."""
