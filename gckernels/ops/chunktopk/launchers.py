"""How the kernels of :mod:`~gckernels.ops.chunktopk` are launched for one unit, and their compile-time arguments."""

from __future__ import annotations

from typing import Any

import torch
import triton

from ...codec import Decoding, Encoding
from ...toolkit.constants import constants
from ...toolkit.kernels.launch import launch, temporary, waits
from ...toolkit.payload import PayloadLayout
from ...toolkit.tiles import chunk_step
from .groups import NUMEL_OF_PROGRAM, groups_per_program
from .kernels import _decode_kernel, _encode_kernel
from .selecting import list_numel, parts_of

_ZERO_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""How many of the lowest bits of numbers of a dtype are 0 in fp32."""

_MAXNREG = 192
"""Limit of a program's registers: by itself, ptxas gives one without a residual too few, and spills a value."""

_ENTRIES_OF_WARP = 128  # in a decoder

_SCRATCH_NUMEL = 4 * 1024 * 1024  # scratch of the decoder, 16 MiB, which a large GPU keeps in its L2 cache


def encode(unit: Encoding, scale: float = 1.0) -> None:
    """Launch the encoding of a unit."""
    compressor, grad, residual, payload, size = unit.compressor, unit.grad, unit.residual, unit.payload, unit.size
    numel, chunks = grad.numel(), payload.shape[0]
    num_groups = groups_of(compressor, size)
    programs = encode_programs_of(compressor, size)
    scratch = temporary(
        chunks, programs, list_numel(compressor.chunk, compressor.k), dtype=torch.int16, device=grad.device
    )
    launch(
        _encode_kernel,
        (programs, chunks),
        *(grad, grad if residual is None else residual, payload, scratch),
        *(numel, chunk_step(size, chunks), payload.stride(0), num_groups, *fields_of(compressor, size)),
        **encode_settings(compressor, grad.dtype, residual is not None),
    )


def decode(unit: Decoding, scale: float = 1.0, accumulate: bool = False) -> None:
    """Launch the decoding and merging of a unit."""
    compressor, payloads, out, size = unit.compressor, unit.payloads, unit.out, unit.size
    sources, chunks, _ = payloads.shape
    layout, programs = compressor.layout(size), programs_of(compressor, min(size, out.numel()))
    at_once, room = decode_scratch(compressor, chunks * programs)
    scratch = temporary(at_once, room, dtype=torch.float32, device=out.device)
    launch(
        _decode_kernel,
        (at_once,),
        *(payloads, out, scratch, out.numel(), chunk_step(size, chunks), programs, chunks * programs),
        *(sources, payloads.stride(0), payloads.stride(1), layout["indices"].offset, layout["values"].offset),
        scale,
        **decode_settings(compressor, accumulate),
    )


def groups_of(compressor, size: int) -> int:
    """The number of groups of ``size`` elements."""
    return -(-size // compressor.chunk)


def programs_of(compressor, size: int) -> int:
    """The number of programs that encode or decode ``size`` elements."""
    return -(-size // (compressor.chunk * groups_per_program(compressor.chunk)))


def encode_programs_of(compressor, size: int) -> int:
    """The number of programs that encode ``size`` elements, one at least, which writes the header."""
    return max(1, programs_of(compressor, size))


def decode_scratch(compressor, programs: int) -> tuple[int, int]:
    """How many of the programs that decode are there at once, and how many elements each has room for."""
    numel = compressor.chunk * groups_per_program(compressor.chunk)
    return min(programs, _SCRATCH_NUMEL // numel), numel


def fields_of(compressor, size: int) -> tuple[int, ...]:
    """Numbers about a payload: ``scales_nbytes`` to ``values_nbytes`` of the kernel that encodes."""
    layout = compressor.layout(size)
    indices, values = layout["indices"], layout["values"]
    return _scales_place(layout)[1], indices.offset, indices.nbytes, values.offset, values.nbytes


def encode_settings(compressor, dtype: torch.dtype, has_residual: bool) -> dict[str, Any]:
    """Compile-time arguments and options of kernels that encode."""
    parts = parts_of(compressor.chunk, compressor.k)
    return {
        "C": constants(
            **_format(compressor),
            log2_k_pad=(compressor.k - 1).bit_length(),
            parts=parts,  # see selecting.py
            shift=0 if has_residual else _ZERO_BITS[dtype],
            listed=list_numel(compressor.chunk, compressor.k),
            has_residual=has_residual,
            waits=waits(),
        ),
        "num_warps": _encode_warps(compressor.chunk, parts),
        "maxnreg": _MAXNREG if parts and not has_residual else None,
    }


def decode_settings(compressor, accumulate: bool) -> dict[str, Any]:
    """Compile-time arguments and options of kernels that decode."""
    k_pad = triton.next_power_of_2(compressor.k)
    return {
        "C": constants(**_format(compressor), k_pad=k_pad, accumulate=accumulate, waits=waits()),
        # each warp does all that is done once for a source, so there are only as many as have some entries each
        "num_warps": max(1, min(8, k_pad * groups_per_program(compressor.chunk) // _ENTRIES_OF_WARP)),
    }


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
