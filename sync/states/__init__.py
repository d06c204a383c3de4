"""Saved states: their layout, checks, and conversion to another number of ranks."""
