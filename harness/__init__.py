"""Tools that tests and benchmarks share, and users do not need: they are not installed."""
