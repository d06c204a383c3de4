"""Gradient compression for PyTorch: fused kernels, drop-in ops, compressors.

``gckernels`` holds the algorithms and knows nothing of communication; ``gckernels.sync`` sends what they encode.
"""

from .compressor import COMPRESSORS, Compressor, chunk_numel, from_json, from_spec, register
from .ops import *  # noqa: F403  the table of algorithms is kept in ops/__init__.py alone
from .ops import __all__ as _algorithms

__version__ = "0.1.0"
__all__ = [
    "COMPRESSORS",
    "Compressor",
    "__version__",
    "chunk_numel",
    "from_json",
    "from_spec",
    "register",
    *_algorithms,
]
