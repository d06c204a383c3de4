"""The kernels of sparsifiers, for units by themselves and bound together."""

from __future__ import annotations

from ..kernels.sharing import KernelBackend
from .decode_kernels import decode
from .encode_kernels import encode


class SparsifierTriton(KernelBackend):
    """Sparsifiers as kernels. Small units that are bound together share launches."""

    encode = staticmethod(encode)
    decode = staticmethod(decode)
