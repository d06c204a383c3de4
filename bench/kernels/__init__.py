"""Benchmarks of compressors in one process: kernels, the host path, and the cost of a call."""
