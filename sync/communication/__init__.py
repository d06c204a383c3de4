"""Collectives of ranks, the groups and connections for them, and agreement over ranks."""
