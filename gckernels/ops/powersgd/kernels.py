"""The kernels of PowerSGD, for any number of matrices in a launch.

A table on the device holds the addresses of every matrix and of its factors. A work list holds, for every program, the
matrix and the part of it that the program works on. Both follow from addresses and shapes alone, so they are made only
once for tensors that stay in place. No kernel adds atomically: equal input gives equal bits.
"""

from .bases_kernels import bind_orthogonalise, orthogonalise
from .keep_kernels import bind_keep, keep
from .products_kernels import bind_left, bind_reconstruct, bind_right, left, reconstruct, right

__all__ = [
    "bind_keep",
    "bind_left",
    "bind_orthogonalise",
    "bind_reconstruct",
    "bind_right",
    "keep",
    "left",
    "orthogonalise",
    "reconstruct",
    "right",
]
