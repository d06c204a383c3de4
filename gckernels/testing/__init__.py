"""Helpers for tests, benches and third parties. No other part of the package imports them."""
