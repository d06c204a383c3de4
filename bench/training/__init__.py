"""Training with every compressor, compared with none."""
