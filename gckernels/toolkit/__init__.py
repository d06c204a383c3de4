"""Building blocks of compressors: payload layout, bit packing, random numbers, generic kernels and host code."""
