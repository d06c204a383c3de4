"""Configurations that are tested and compiled ahead of time: the defaults of all classes, and more."""

from __future__ import annotations

from typing import cast

import gckernels
from gckernels import CODECS, Codec

EXTRA = (
    "BlockFP8(format='e5m2', block=32)",
    "BlockQuant(bits=4)",
    "BlockQuant(bits=4, block=32, scale_dtype='bfloat16')",
    "Cast16(dtype='float16')",
    "ChunkTopK(chunk=64, k=8, value_bits=8)",
    "ChunkTopK(chunk=1024, k=40, value_bits=4)",
    "ChunkTopK(chunk=256, k=16, value_bits=2)",
    "DGC(ratio=0.05, momentum=0.5, nesterov=True, clip=10.0, workers=4, value_bits=4)",
    "DGC(ratio=0.2, momentum=0.0)",
    "EFSignSGD(block=None)",
    "EFSignSGD(block=1024, magnitude='projection')",
    "EFSignSGD(block=None, magnitude='projection')",
    "GradDrop(value_bits=8)",
    "LinearQuant(bits=1)",
    "LinearQuant(bits=4, stochastic=True, block=128)",
    "MSTopK(ratio=0.1, value_bits=2)",
    "OneBit(block=None)",
    "QSGD(levels=4, bucket=32)",
    "QSGD(levels=127, bucket=1024)",
    "RandomK(ratio=0.01)",
    "SigNUM(beta=0.0)",
    "TernGrad(block=None)",
    "TernGrad(clip=2.5, block=None)",
    "TernGrad(clip=0.5)",
    "Threshold(tau=0.0, ratio=1.0)",
    "TopK(ratio=0.001, value_bits=16)",
    "TopK(ratio=0.25, value_bits=4)",
)
"""Configurations in addition to the default one of every class."""

DEFAULTS: dict[str, Codec] = {name: cls() for name, cls in sorted(CODECS.items())}
CONFIGURATIONS: dict[str, Codec] = DEFAULTS | {spec: cast(Codec, gckernels.from_spec(spec)) for spec in EXTRA}
