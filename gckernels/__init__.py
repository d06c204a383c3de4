"""Gradient compression for PyTorch: fused kernels, drop-in ops, compressors.

``gckernels`` holds the algorithms and knows nothing of communication; ``gckernels.sync`` sends what they encode.
"""

from collections.abc import Callable as _Callable

from torch import Tensor as _Tensor

from . import requirements as _requirements  # noqa: F401  before all that fails without them
from .compressor import COMPRESSORS, Compressor, chunk_numel
from .functional import FUNCTIONS as _functions
from .method import METHODS, Method, from_json, from_spec
from .ops import *  # noqa: F403  the table of algorithms is kept in ops/__init__.py alone
from .ops import __all__ as _algorithms
from .registration import register
from .toolkit.host.threads import get_num_threads, set_num_threads

__version__ = "0.1.0"
__all__ = [
    "COMPRESSORS",
    "METHODS",
    "Compressor",
    "Method",
    "__version__",
    "chunk_numel",
    "from_json",
    "from_spec",
    "get_num_threads",
    "register",
    "set_num_threads",
    *_algorithms,
    *_functions,
]


def __getattr__(name: str) -> _Callable[..., _Tensor]:
    """The functions of the registered compressors, those that are registered later included."""
    if name in _functions:
        globals()[name] = _functions[name]  # found without this detour from now on
        return _functions[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_functions})
