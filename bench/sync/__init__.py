"""Benchmarks of synchronisation: the hook, whole steps, exchanges, building messages."""
