"""The kernels of :mod:`~gckernels.ops.chunktopk`: a Triton program encodes or decodes one group, or several small ones
together."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...codec import Decoding, Encoding
from ...toolkit.kernels.launch import launch, temporary
from ...toolkit.payload import STATUS_OK, PayloadLayout
from ...toolkit.tiles import chunk_step
from .groups import NUMEL_OF_PROGRAM, groups_per_program
from .programs import decode_program, encode_program
from .selecting import list_numel, parts_of

_ZERO_BITS = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}
"""How many of the lowest bits of numbers of a dtype are 0 in fp32."""

_MAXNREG = 192
"""Limit of a program's registers: by itself, ptxas gives one without a residual too few, and spills a value."""

_ENTRIES_OF_WARP = 128  # in a decoder

_SCRATCH_NUMEL = 4 * 1024 * 1024  # scratch of the decoder, 16 MiB, which a large GPU keeps in its L2 cache


@triton.jit(do_not_specialize=["num_groups"])
def _encode_kernel(
    grad_ptr,
    residual_ptr,
    payload_ptr,  # uint8 [chunks, payload_stride]
    scratch_ptr,  # int16 [chunks, programs, LISTED]
    numel,
    chunk_numel,
    payload_stride,
    num_groups,
    scales_nbytes,  # padding included, like the other two
    indices_offset,
    indices_nbytes,
    values_offset,
    values_nbytes,
    STATUS: tl.constexpr,
    SCALES_OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    LOG2_K_PAD: tl.constexpr,
    PARTS: tl.constexpr,
    SHIFT: tl.constexpr,
    LISTED: tl.constexpr,
    BITS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    WAITS: tl.constexpr,
):
    program, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    scratch_ptr += (chunk * tl.num_programs(0) + program) * LISTED
    encode_program(
        grad_ptr, residual_ptr, payload_ptr, scratch_ptr, program, chunk, numel, chunk_numel, payload_stride,
        num_groups, scales_nbytes, indices_offset, indices_nbytes, values_offset, values_nbytes, STATUS, SCALES_OFFSET,
        GROUP, GROUPS, K, LOG2_K_PAD, PARTS, SHIFT, BITS, HAS_RESIDUAL, WAITS
    )  # fmt: skip


@triton.jit(do_not_specialize=["programs", "num_items", "num_sources"])
def _decode_kernel(
    payload_ptr,
    out_ptr,
    scratch_ptr,  # fp32 [at once, GROUPS * GROUP]
    numel,
    chunk_numel,
    programs,  # per chunk
    num_items,  # chunks * programs
    num_sources,
    source_stride,
    chunk_stride,
    indices_offset,
    values_offset,
    scale,
    STATUS: tl.constexpr,
    SCALES_OFFSET: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
    K: tl.constexpr,
    K_PAD: tl.constexpr,
    BITS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    WAITS: tl.constexpr,
):
    scratch_ptr += tl.program_id(0).to(tl.int64) * (GROUPS * GROUP)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        program, chunk = (item % programs).to(tl.int64), (item // programs).to(tl.int64)
        decode_program(
            payload_ptr, out_ptr, scratch_ptr, program, chunk, numel, chunk_numel, num_sources, source_stride,
            chunk_stride, indices_offset, values_offset, scale, STATUS, SCALES_OFFSET, GROUP, GROUPS, K, K_PAD, BITS,
            ACCUMULATE, WAITS
        )  # fmt: skip


# -------------------------------------------------------------------- launchers


def encode(unit: Encoding, scale: float = 1.0) -> None:
    """Launch the encoding of a unit."""
    compressor, grad, residual, payload, size = unit.compressor, unit.grad, unit.residual, unit.payload, unit.size
    numel, chunks = grad.numel(), payload.shape[0]
    num_groups = groups_of(compressor, size)
    programs = encode_programs_of(compressor, size)
    constants = encode_constants(compressor, grad.dtype, residual is not None)
    scratch = temporary(chunks, programs, constants["LISTED"], dtype=torch.int16, device=grad.device)
    launch(
        _encode_kernel,
        (programs, chunks),
        *(grad, grad if residual is None else residual, payload, scratch),
        *(numel, chunk_step(size, chunks), payload.stride(0), num_groups, *fields_of(compressor, size)),
        **constants,
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
        **decode_constants(compressor, accumulate),
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


def encode_constants(compressor, dtype: torch.dtype, has_residual: bool) -> dict[str, Any]:
    """Compile-time arguments and options of kernels that encode."""
    parts = parts_of(compressor.chunk, compressor.k)
    return _constants(compressor) | {
        "LOG2_K_PAD": (compressor.k - 1).bit_length(),
        "PARTS": parts,
        "SHIFT": 0 if has_residual else _ZERO_BITS[dtype],
        "LISTED": list_numel(compressor.chunk, compressor.k),
        "HAS_RESIDUAL": has_residual,
        "num_warps": _encode_warps(compressor.chunk, parts),
        "maxnreg": _MAXNREG if parts and not has_residual else None,
    }


def decode_constants(compressor, accumulate: bool) -> dict[str, Any]:
    """Compile-time arguments and options of kernels that decode."""
    k_pad = triton.next_power_of_2(compressor.k)
    return _constants(compressor) | {
        "K_PAD": k_pad,
        "ACCUMULATE": accumulate,
        # each warp does all that is done once for a source, so there are only as many as have some entries each
        "num_warps": max(1, min(8, k_pad * groups_per_program(compressor.chunk) // _ENTRIES_OF_WARP)),
    }


def _constants(compressor) -> dict[str, Any]:
    return {
        "STATUS": STATUS_OK,
        "SCALES_OFFSET": _scales_place(compressor.layout(0))[0],
        "GROUP": compressor.chunk,
        "GROUPS": groups_per_program(compressor.chunk),
        "K": compressor.k,
        "BITS": compressor.value_bits,
        "exchanges": True,
    }


def _encode_warps(group: int, parts: int) -> int:
    """Warps of a program that encodes. With few of them, what they do for few elements takes less of the others' time,
    and so does counting in shared memory."""
    return 1 if group <= NUMEL_OF_PROGRAM.value else group // (2048 if parts else 512)


def _scales_place(layout: PayloadLayout) -> tuple[int, int]:
    """Offset and size in bytes of the scales, (0, 0) if there are none."""
    found = [(field.offset, field.nbytes) for field in layout.fields if field.name == "scales"]
    return found[0] if found else (0, 0)
