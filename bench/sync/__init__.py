"""Benchmarks of synchronisation: the hook, whole steps, building messages."""
