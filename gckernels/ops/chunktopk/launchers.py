"""The launches of the kernels of :mod:`~gckernels.ops.chunktopk`, and their compile-time arguments."""

from __future__ import annotations

import torch
import triton

from ...codec import Decoding, Encoding
from ...toolkit.constants import constants
from ...toolkit.kernels.launch import launch, temporary, waits
from ...toolkit.kernels.sharing import KernelBackend
from ...toolkit.payload import PayloadLayout
from ...toolkit.tiles import chunk_step
from .groups import NUMEL_OF_PROGRAM, groups_per_program
from .kernels import _decode_kernel, _encode_kernel
from .selecting import list_numel, parts_of

_ZERO_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""How many of the lowest bits of numbers of a dtype are 0 in fp32."""

_MAXNREG = 192
"""Limit of a program's registers: by itself, ptxas gives one without a residual too few, and spills a value."""

_SHARED_MAXNREG = 152
"""The same of a program with small groups of one of many units: by itself, ptxas takes up to 160."""

_ENTRIES_OF_WARP = 128  # in a decoder

_SCRATCH_NUMEL = 4 * 1024 * 1024  # scratch of the decoder, 16 MiB, which a large GPU keeps in its L2 cache


def encode(unit: Encoding, scale: float = 1.0) -> None:
    """Launch the encoding of a unit."""
    compressor, grad, residual, size = unit.compressor, unit.grad, unit.residual, unit.size
    chunks, group, has_residual = unit.payload.shape[0], compressor.chunk, residual is not None
    programs = max(1, _programs_of(compressor, size))  # one at least, which writes the header
    parts, listed = parts_of(group, compressor.k), list_numel(group, compressor.k)
    layout = compressor.layout(size)
    indices, values = layout["indices"], layout["values"]
    launch(
        _encode_kernel,
        (programs, chunks),
        *(grad, grad if residual is None else residual, unit.payload),
        temporary(chunks, programs, listed, dtype=torch.int16, device=grad.device),
        *(grad.numel(), chunk_step(size, chunks), unit.payload.stride(0), -(-size // group), _scales_place(layout)[1]),
        *(indices.offset, indices.nbytes, values.offset, values.nbytes),
        C=constants(
            **_format(compressor),
            log2_k_pad=(compressor.k - 1).bit_length(),
            parts=parts,  # see selecting.py
            shift=0 if has_residual else _ZERO_BITS[grad.dtype],
            listed=listed,
            has_residual=has_residual,
            waits=waits(),
        ),
        num_warps=_encode_warps(group, parts),
        maxnreg=_MAXNREG if parts and not has_residual else None,
        shared_maxnreg=None if parts else _SHARED_MAXNREG,
    )


def decode(unit: Decoding, scale: float = 1.0, accumulate: bool = False) -> None:
    """Launch the decoding and merging of a unit."""
    compressor, payloads, out, size = unit.compressor, unit.payloads, unit.out, unit.size
    sources, chunks, _ = payloads.shape
    layout, programs = compressor.layout(size), _programs_of(compressor, min(size, out.numel()))
    numel, k_pad = _numel_of_program(compressor), triton.next_power_of_2(compressor.k)
    at_once = min(programs, max(1, _SCRATCH_NUMEL // (numel * chunks)))
    launch(
        _decode_kernel,
        (at_once, chunks),
        *(payloads, out, temporary(chunks, at_once, numel, dtype=torch.float32, device=out.device), out.numel()),
        *(chunk_step(size, chunks), programs, sources, payloads.stride(0), payloads.stride(1)),
        *(layout["indices"].offset, layout["values"].offset, scale),
        C=constants(**_format(compressor), k_pad=k_pad, accumulate=accumulate, loops=at_once < programs, waits=waits()),
        # each warp does all that is done once for a source, so there are only as many as have some entries each
        num_warps=max(1, min(8, k_pad * groups_per_program(compressor.chunk) // _ENTRIES_OF_WARP)),
    )


def _numel_of_program(compressor) -> int:
    return compressor.chunk * groups_per_program(compressor.chunk)


def _programs_of(compressor, size: int) -> int:
    """The number of programs for ``size`` elements."""
    return -(-size // _numel_of_program(compressor))


def _format(compressor) -> dict[str, int]:
    return {
        "scales_offset": _scales_place(compressor.layout(0))[0],
        "group": compressor.chunk,
        "groups": groups_per_program(compressor.chunk),
        "k": compressor.k,
        "bits": compressor.value_bits,
    }


def _encode_warps(group: int, parts: int) -> int:
    """Warps of a program that encodes. With few of them, what they do for few elements takes less of the others' time,
    and so does counting in shared memory."""
    return 1 if group <= NUMEL_OF_PROGRAM.value else group // (2048 if parts else 512)


def _scales_place(layout: PayloadLayout) -> tuple[int, int]:
    """Offset and size in bytes of the scales, (0, 0) if there are none."""
    found = [(field.offset, field.nbytes) for field in layout.fields if field.name == "scales"]
    return found[0] if found else (0, 0)


class ChunkTopKTriton(KernelBackend):
    """The algorithm as kernels. Small units that are bound together share launches."""

    encode = staticmethod(encode)
    decode = staticmethod(decode)
