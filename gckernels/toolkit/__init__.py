"""What compressors are built from: payload layout, bit packing, random numbers, map kernels, op registration."""
