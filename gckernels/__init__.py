"""Gradient compression for PyTorch: fused kernels, drop-in ops, compressors.

``gckernels`` has the algorithms and does not communicate; ``gckernels.sync`` sends encoded gradients;
``gckernels.planner`` predicts the time that this takes, and chooses plans. ``gckernels.patches`` writes what changed
between two versions of weights.
"""

from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING

from . import requirements as _requirements  # noqa: F401  first, because the other imports fail without them
from .codec import CODECS as CODECS
from .codec import Codec as Codec
from .codec import chunk_numel as chunk_numel
from .compressor import COMPRESSORS as COMPRESSORS
from .compressor import Compressor as Compressor
from .compressor import Traits as Traits
from .compressor import from_json as from_json
from .compressor import from_spec as from_spec
from .functional import decode as decode
from .functional import encode as encode
from .functional import recode as recode
from .ops import *  # noqa: F403  only ops/__init__.py names the algorithms
from .registration import register as register
from .toolkit.host.threads import get_num_threads as get_num_threads
from .toolkit.host.threads import set_num_threads as set_num_threads
from .toolkit.residuals import decode_residual as decode_residual
from .toolkit.residuals import encode_residual as encode_residual
from .toolkit.residuals import residual_nbytes as residual_nbytes

__version__ = "0.1.0"

if not _TYPE_CHECKING:  # type checkers use the imports above: "import A as A" makes A public
    __all__ = [n for n, value in globals().items() if n[0] != "_" and not isinstance(value, _ModuleType)]
