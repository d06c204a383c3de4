"""Helpers for tests, benchmarks and third parties; no other part of the package imports them."""
