"""The algorithms, one file each: wire format, reference, kernel, launcher, compressor."""

from .blockfp8 import BlockFP8
from .blockquant import BlockQuant
from .cast16 import Cast16
from .chunktopk import ChunkTopK
from .dgc import DGC
from .efsignsgd import EFSignSGD
from .graddrop import GradDrop
from .identity import Identity
from .linearquant import LinearQuant
from .mstopk import MSTopK
from .natural import Natural
from .onebit import OneBit
from .powersgd import (
    PowerSGD,
    ops,  # noqa: F401  defines torch.ops.gckernels.powersgd_*
)
from .qsgd import QSGD
from .randomk import RandomK
from .signsgd import SignSGD
from .signum import SigNUM
from .tbq import TBQ
from .terngrad import TernGrad
from .threshold import Threshold
from .topk import TopK

__all__ = [
    "DGC",
    "QSGD",
    "TBQ",
    "BlockFP8",
    "BlockQuant",
    "Cast16",
    "ChunkTopK",
    "EFSignSGD",
    "GradDrop",
    "Identity",
    "LinearQuant",
    "MSTopK",
    "Natural",
    "OneBit",
    "PowerSGD",
    "RandomK",
    "SigNUM",
    "SignSGD",
    "TernGrad",
    "Threshold",
    "TopK",
]
