"""Measurements of synchronisation: the hook, whole steps, overlap, building, the error of a ring."""
