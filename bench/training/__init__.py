"""Benchmarks of training with every compressor, compared with training without compression."""
