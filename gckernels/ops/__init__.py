"""The algorithms, one file or folder each: wire format, reference, kernel, launcher, compressor.

A class that is imported here is found by plans and command lines, and is a public name of the package.
"""

from typing import TYPE_CHECKING

from .blockfp8 import BlockFP8 as BlockFP8
from .blockquant import BlockQuant as BlockQuant
from .cast16 import Cast16 as Cast16
from .chunktopk import ChunkTopK as ChunkTopK
from .dgc import DGC as DGC
from .efsignsgd import EFSignSGD as EFSignSGD
from .graddrop import GradDrop as GradDrop
from .identity import Identity as Identity
from .linearquant import LinearQuant as LinearQuant
from .mstopk import MSTopK as MSTopK
from .natural import Natural as Natural
from .onebit import OneBit as OneBit
from .powersgd import PowerSGD as PowerSGD
from .qsgd import QSGD as QSGD
from .randomk import RandomK as RandomK
from .signsgd import SignSGD as SignSGD
from .signum import SigNUM as SigNUM
from .tbq import TBQ as TBQ
from .terngrad import TernGrad as TernGrad
from .threshold import Threshold as Threshold
from .topk import TopK as TopK

if not TYPE_CHECKING:  # type checkers go by the names above: "import A as A" makes A public
    __all__ = [name for name, value in globals().items() if isinstance(value, type)]
