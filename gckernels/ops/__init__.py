"""The algorithms, one file each: wire format, reference, kernel, launcher, compressor."""

from .block_quant import BlockQuant
from .cast16 import Cast16
from .chunk_top_k import ChunkTopK
from .ef_sign_sgd import EFSignSGD
from .identity import Identity

__all__ = ["BlockQuant", "Cast16", "ChunkTopK", "EFSignSGD", "Identity"]
