"""Benchmarks of synchronisation: the hook, whole steps, overlap, building messages."""
