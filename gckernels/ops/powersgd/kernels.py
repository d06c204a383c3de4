"""The kernels of PowerSGD: any number of matrices in a launch.

A table on the device says of every matrix where it and its factors are; a list of work says of every program which part
of which matrix is its own. Both hold nothing but numbers that follow from addresses and shapes, so they are made once
for tensors that stay where they are. No kernel adds atomically: equal input gives equal bits.
"""

from .bases_kernels import keep, orthogonalise
from .products_kernels import left, reconstruct, right

__all__ = ["keep", "left", "orthogonalise", "reconstruct", "right"]
