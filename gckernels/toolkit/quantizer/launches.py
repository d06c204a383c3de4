"""The launches of quantisers' kernels: their shapes and compile-time arguments."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton

from ...codec import Decoding, Encoding, Recoding
from ..constants import Constants
from ..kernels.launch import launch, temporary
from ..kernels.sharing import KernelBackend
from ..tiles import chunk_step
from . import kernels
from .generated import number_form, triton_functions
from .maps import LARGEST, SUM, Statistic

TILE = 4096
PARTIALS, MAX_PARTIALS = 128, 1024
WHOLE_BLOCK = 128
_MAXNREG, _MAXNREG_OF_MANY_TERMS, _MAXNREG_OF_RANDOM, _MAXNREG_OF_SOURCES = 128, 168, 96, 96


@dataclass(frozen=True)
class Shape:
    """A payload as the kernels see it.

    Attributes:
        blocks: number of blocks that have statistics: 1 with a statistic of the whole chunk, 0 without statistics.
        stats_slots: number of statistics that fit the field, padding included.
        codes_offset: bytes before the codes.
        codes_nbytes: bytes of the codes, padding included.
        encode_tiles, decode_tiles: number of programs that encode and decode a chunk.
        terms: number of terms of a statistic of the whole chunk, otherwise 0.
        num_partials: number of partial results of each term, which are combined.
        decode_warps: warps of a program that decodes.
    """

    blocks: int
    stats_slots: int
    codes_offset: int
    codes_nbytes: int
    encode_tiles: int
    decode_tiles: int
    terms: int
    num_partials: int
    decode_warps: int

    def encode_warps(self, quantizer, source_dtype: torch.dtype, has_residual: bool) -> int:
        """Warps of a program that encodes a gradient, or payloads (``torch.uint8``).

        A thread with 32 elements shares the keys of the random generator, addresses and branches among them. If it
        draws numbers for a gradient of 16 bits, it has 64, which are as many bytes. A program that keeps more in
        registers, because it has a residual or merges payloads, has half as many, so that enough programs run at once.
        """
        if has_residual or source_dtype == torch.uint8:
            return self.decode_warps * 2
        if quantizer.traits.stochastic and source_dtype.itemsize == 2:
            return self.decode_warps // 2
        return self.decode_warps

    @property
    def whole(self) -> bool:
        """Whether there is one statistic for the whole chunk."""
        return self.terms > 0

    @property
    def combines(self) -> bool:
        """Whether a launch of its own reduces the partial results, because they are many."""
        return self.whole and self.num_partials > PARTIALS

    @property
    def partials_width(self) -> int:
        """Width of the vector of partial results that a program which encodes reduces: one of two, so that units of all
        sizes share kernels."""
        return 1 if self.combines else PARTIALS


def encode_maxnreg(quantizer, has_residual: bool, merging: bool) -> int | None:
    """Limit of the registers of a program that encodes; ``None`` if ptxas chooses.

    By itself, ptxas gives some programs that merge, or that draw numbers and have a residual, fewer registers than they
    need, and spills a value. Most of those that draw numbers get more than they need.
    """
    if not merging:
        return _MAXNREG_OF_RANDOM if has_residual and quantizer.traits.stochastic else None
    statistic = quantizer.maps.statistic
    return _MAXNREG_OF_MANY_TERMS if statistic and len(statistic.kinds) > 3 else _MAXNREG


def decode_many_maxnreg(quantizer, sources: int) -> int | None:
    """Limit of the registers of a program that decodes one of many units; ``None`` if ptxas chooses.

    By itself, ptxas gives programs that merge numbers of 4 bits and more up to 114 registers, so that an SM holds four
    of them in place of five. It gives all others fewer than this limit, and would take more if there were one.
    """
    is_large = number_form(quantizer) is not None and quantizer.bits >= 4 and (quantizer.block or 0) >= WHOLE_BLOCK
    return _MAXNREG_OF_SOURCES if sources > 1 and is_large and quantizer.num_stats == 1 else None


def payload_shape(quantizer, size: int) -> Shape:
    """The payload of ``size`` elements, as the kernels see it."""
    layout, statistic = quantizer.layout(size), quantizer.maps.statistic
    codes = layout["codes"]
    stats = layout["stats"] if statistic else None
    whole = quantizer.block is None and statistic is not None
    blocks = stats.count // statistic.size if stats else 0
    slots = stats.nbytes // stats.dtype.itemsize if stats else 0
    rows, columns = _tile(quantizer.block)
    decode_tiles = triton.cdiv(size, rows * columns)
    tiles = max(1, decode_tiles)
    # a program without a tile stores the neutral element of the reduction
    num_partials = min(triton.next_power_of_2(tiles), MAX_PARTIALS)
    if statistic and not whole:  # programs without elements write the padding of the field
        tiles = max(tiles, triton.cdiv(blocks + slots - blocks * statistic.size, rows))
    terms = len(statistic.kinds) if whole else 0
    warps = max(4, rows * columns // 1024)
    return Shape(blocks, slots, codes.offset, codes.nbytes, tiles, decode_tiles, terms, num_partials, warps)


def _zeros_are_neutral(statistic: Statistic, quantizer) -> bool:
    """Whether the zeros behind a chunk's last element change no term of the statistic."""
    zero, C = torch.zeros(1, dtype=torch.float32, device="cpu"), quantizer.constants
    zeros = torch.cat((zero, quantizer.maps.accumulate(zero, zero, C)))
    bare = all(kind in (SUM, LARGEST) for kind in statistic.kinds)
    return bare and all(bool((term == 0).all()) for term in statistic.terms(zeros, C))


@functools.lru_cache(maxsize=4096)  # every launch of every step needs it
def kernel_constants(
    quantizer,
    *,
    has_residual: bool = False,
    encoded_residual: bool = False,
    merging: bool = False,
    partials_width: int = 0,
    adds_to_out: bool = False,
) -> Constants:
    """Compile-time arguments of the kernels, their ``Q``.

    The attributes are the functions of the quantiser's maps, by name, and

    - ``C``: the quantiser's constants, which these functions get;
    - ``bits``: bits per code; ``numbers``: see :func:`.generated.number_form`;
    - ``rows`` and ``block``: rows and columns of a tile; ``tile``: their product; ``parts``: see :func:`_parts`;
    - ``statistic``: ``kinds``, the reduction of each of its terms; ``pads``, whether missing elements have to be
      masked; and its functions ``terms`` and ``finish``; ``None`` without one;
    - ``shortcut``: the same of its shortcut, which also has a function ``holds``; ``None`` without one;
    - ``num_stats``: statistics per block; ``stats_bf16``: whether they are stored as bf16;
    - ``whole``: whether there is one statistic for the whole chunk;
    - ``random``: whether elements draw random numbers; ``dither_base`` and ``surety``: see :class:`.Maps`, or ``None``;
    - ``has_residual``: whether there is a residual; ``encoded_residual``: whether it is in 8 bits; ``merging``: whether
      payloads are encoded;
    - ``partials_width``: see :class:`Shape`;
    - ``adds_to_out``: whether decoded values are added to the sum that the output holds.
    """
    statistic, shortcut = quantizer.maps.statistic, quantizer.shortcut
    rows, columns = _tile(quantizer.block)
    made = dict(triton_functions(quantizer))

    def functions(prefix: str, of: Statistic) -> Constants:
        names = [name for name in ("terms", "finish", "holds") if prefix + name in made]
        pads = merging or not _zeros_are_neutral(of, quantizer)
        return Constants(kinds=of.kinds, pads=pads, **{name: made.pop(prefix + name) for name in names})

    return Constants(
        **{"surety": None} | made,
        C=quantizer.constants,
        bits=quantizer.bits,
        numbers=number_form(quantizer),
        rows=rows,
        block=columns,
        tile=rows * columns,
        parts=1 if has_residual or merging else _parts(quantizer),
        statistic=functions("", statistic) if statistic else None,
        shortcut=functions("quick_", shortcut.statistic) if shortcut else None,
        num_stats=quantizer.num_stats,
        stats_bf16=quantizer.stats_dtype == torch.bfloat16,
        whole=quantizer.block is None and statistic is not None,
        random=quantizer.traits.stochastic,
        dither_base=quantizer.maps.dither_base,
        has_residual=has_residual,
        encoded_residual=encoded_residual,
        merging=merging,
        partials_width=partials_width,
        adds_to_out=adds_to_out,
    )


def _tile(block: int | None) -> tuple[int, int]:
    """Rows and columns of a tile."""
    columns = block or WHOLE_BLOCK
    return max(1, TILE // columns), columns


def _parts(quantizer) -> int:
    """Into how many parts the rows of a tile are cut, see :func:`.tiles.load_rows`; at least 32 elements each.

    Threads share longer rows in the same way without parts, and rows without statistics need none. Programs that also
    read a residual would take more registers than their limit.
    """
    if quantizer.block is None or not quantizer.num_stats or quantizer.block > 256:
        return 1
    return min(4, quantizer.block // 32)


def encode(unit: Encoding, scale: float = 1.0) -> None:
    """Launch the encoding of a unit."""
    _encode(unit.compressor, unit, unit.grad, unit.grad.numel(), unit.payload, (0, 0), 1.0)


def recode(unit: Recoding, scale: float = 1.0) -> None:
    """Launch the merging and encoding of a unit."""
    sources, quantizer = (unit.payloads.shape[0], unit.payloads.stride(0)), unit.compressor.shard_compressor
    _encode(quantizer, unit, unit.payloads, unit.numel, unit.payload[None], sources, scale)


def _encode(
    quantizer,
    unit: Encoding | Recoding,
    source: torch.Tensor,
    numel: int,
    payload: torch.Tensor,
    sources: tuple[int, int],
    scale: float,
) -> None:
    """Launch the encoding of ``source``, a gradient or payloads, whose number and stride are ``sources``."""
    shape, residual, chunks = payload_shape(quantizer, unit.size), unit.residual, payload.shape[0]
    merging, has_residual = source.dtype == torch.uint8, residual is not None
    forms = {
        "has_residual": has_residual,
        "encoded_residual": residual is not None and residual.dtype == torch.uint8,
        "merging": merging,
    }
    target = source if residual is None else residual
    extent, num_warps = (
        (numel, chunk_step(unit.size, chunks)),
        shape.encode_warps(quantizer, source.dtype, has_residual),
    )
    partials, num_partials = target, 1
    if shape.whole:
        num_partials = shape.num_partials
        partials = temporary(chunks, shape.terms, num_partials, dtype=torch.float32, device=payload.device)
        launch(
            kernels._partials_kernel,
            (num_partials, chunks),
            *(source, target, partials, *extent, num_partials, *sources),
            *(shape.blocks, shape.codes_offset, shape.codes_nbytes, scale),
            Q=kernel_constants(quantizer, **forms),
            num_warps=num_warps,
        )
        if shape.combines:
            combined = temporary(chunks, shape.terms, dtype=torch.float32, device=payload.device)
            constants = kernel_constants(quantizer, partials_width=MAX_PARTIALS)
            launch(kernels._combine_kernel, (1, chunks), partials, combined, num_partials, Q=constants)
            partials, num_partials = combined, 1
    launch(
        kernels._encode_kernel,
        (shape.encode_tiles, chunks),
        *(source, target, payload, partials, *extent, payload.stride(0), num_partials, *sources),
        *(shape.blocks, shape.stats_slots, shape.codes_offset, shape.codes_nbytes, scale, unit.seed),
        Q=kernel_constants(quantizer, **forms, partials_width=shape.partials_width),
        num_warps=num_warps,
        maxnreg=encode_maxnreg(quantizer, has_residual, merging),
    )


def decode(unit: Decoding, scale: float = 1.0, accumulate: bool = False) -> None:
    """Launch the decoding and merging of a unit."""
    payloads, out = unit.payloads, unit.out
    sources, chunks, _ = payloads.shape
    shape = payload_shape(unit.compressor, unit.size)
    launch(
        kernels._decode_kernel,
        (shape.decode_tiles, chunks),
        *(payloads, out, out.numel(), chunk_step(unit.size, chunks), sources, payloads.stride(0), payloads.stride(1)),
        *(shape.blocks, shape.codes_offset, shape.codes_nbytes, scale),
        Q=kernel_constants(unit.compressor, adds_to_out=accumulate),
        num_warps=shape.decode_warps,
        shared_maxnreg=decode_many_maxnreg(unit.compressor, sources),
    )


class QuantizerTriton(KernelBackend):
    """Quantisers as kernels. Small units that are bound together share launches."""

    encode = staticmethod(encode)
    decode = staticmethod(decode)
    recode = staticmethod(recode)
