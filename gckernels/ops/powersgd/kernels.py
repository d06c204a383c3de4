"""The kernels of PowerSGD, for any number of matrices in a launch.

A table on the device holds the addresses of every matrix and of its factors. A work list holds, for every program, the
matrix and the part of it that the program works on. Both follow from addresses and shapes alone, so they are made only
once for tensors that stay in place. No kernel adds atomically: equal input gives equal bits.
"""

from .bases_kernels import keep, orthogonalise
from .products_kernels import left, reconstruct, right

__all__ = ["keep", "left", "orthogonalise", "reconstruct", "right"]
