"""Measurements of compressors on one process: kernels, the host path, and what a call costs."""
