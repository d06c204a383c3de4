"""What compressors are built from: payload layout, bit packing, random numbers, generic kernels and host code."""
