"""The bytes that codecs move per element, at least, from the properties of the compressor alone.

A codec that makes one pass over memory reads and writes:

- encoding: the gradient (4), the payload, and with feedback the residual twice, once to read and once to write it;
- decoding and merging: every payload, and the result (4);
- recoding: every payload, the new payload, and the residual twice; the merged values are never stored;
- adding in a ring: the received payload, and what an encoding moves;
- low rank: with feedback a projection of the gradient plus the residual stores their sum (12), one of that sum reads it
  (4), and the reconstruction reads it and writes the gradient and the residual (12). The factors are small. Units that
  low-rank messages send exactly are encoded and decoded.

Gradients count as fp32. A unit has feedback if its compressor needs it. For the published algorithms this gives the
known minima: 12.1 bytes for a sign with feedback, 13 for 8 bits with feedback, 4.5 for 4 bits without.
"""

from __future__ import annotations

import functools

from gckernels.codec import Codec
from gckernels.compressor import Compressor
from gckernels.sync.programs.stages import StageKind

from .machine import MachineError

FP32_NBYTES = 4
_SAMPLE_NUMEL = 1 << 20  # large enough that headers do not count

LAUNCHES = {
    StageKind.ENCODE: 2,
    StageKind.ENCODE_SHARD: 2,
    StageKind.DECODE: 1,
    StageKind.RECODE: 3,
    StageKind.ADD: 3,
    StageKind.PROJECT: 2,
    StageKind.RECONSTRUCT: 1,
}
"""Launches of kernels for each work, by device: a statistic or selection comes before an encoding, and a projection is
followed by an orthogonalisation."""


@functools.lru_cache(maxsize=1024)
def payload_nbytes_per_element(compressor: Compressor) -> float:
    """Bytes of payload for each element of a large unit.

    Raises:
        MachineError: the method has no payloads of single vectors.
    """
    if not isinstance(compressor, Codec):
        raise MachineError(f"{compressor.name}: neither encodes nor decodes; its works are project and reconstruct")
    return compressor.payload_nbytes(_SAMPLE_NUMEL) / _SAMPLE_NUMEL


@functools.lru_cache(maxsize=4096)
def moved_nbytes_per_element(work: StageKind, compressor: Compressor, sources: int) -> float:
    """Bytes that a codec reads and writes for each element, at least.

    Args:
        work: the work.
        compressor: the compressor.
        sources: the number of payloads that are merged.

    Raises:
        MachineError: codecs do no such work.
    """
    match work:
        case StageKind.PROJECT if isinstance(compressor, Codec):
            return moved_nbytes_per_element(StageKind.ENCODE, compressor, 1)
        case StageKind.RECONSTRUCT if isinstance(compressor, Codec):
            return moved_nbytes_per_element(StageKind.DECODE, compressor, 1)
        case StageKind.ENCODE | StageKind.ENCODE_SHARD:
            return FP32_NBYTES + _kept(compressor) + payload_nbytes_per_element(compressor)
        case StageKind.DECODE:
            return sources * payload_nbytes_per_element(compressor) + FP32_NBYTES
        case StageKind.RECODE:
            return (sources + 1) * payload_nbytes_per_element(compressor) + _kept(compressor.shard_compressor)
        case StageKind.ADD:
            return FP32_NBYTES + _kept(compressor) + 2 * payload_nbytes_per_element(compressor)
        case StageKind.PROJECT:  # a mean over the rounds, of which only the first reads the gradient
            return (FP32_NBYTES + _kept(compressor) + (compressor.rounds - 1) * FP32_NBYTES) / compressor.rounds
        case StageKind.RECONSTRUCT:
            return 2 * FP32_NBYTES + _kept(compressor) / 2
    raise MachineError(f"{work.value}: is no work of codecs")


def _kept(compressor: Compressor) -> float:
    """Bytes of the residual, read and written."""
    traits = compressor.traits
    return 2 * FP32_NBYTES * traits.states if traits.needs_feedback else 0
