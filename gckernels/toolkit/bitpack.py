"""Packing codes of 1, 2 or 4 bits into bytes.

Codes go lowest bits first: with ``b`` bits, code ``i`` stands in byte ``i * b // 8`` at bit ``i * b % 8``. Example, 1
bit: the codes ``1 0 1 1 0 0 0 0 | 1`` become ``0x0D 0x01``; 4 bits: ``3 10 7`` become ``0xA3 0x07``. Eight bits pass
through. The torch forms serve the references, the NumPy forms the host path, the Triton forms the kernels.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl

BITS = (1, 2, 4, 8)


def packed_nbytes(numel: int, bits: int) -> int:
    """Bytes that ``numel`` codes of ``bits`` bits take."""
    return -(-numel * bits // 8)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """``[numel]`` integer codes in ``0 .. 2**bits - 1`` to ``uint8 [packed_nbytes(numel, bits)]``."""
    per_byte = 8 // bits
    padded = codes.new_zeros(packed_nbytes(codes.numel(), bits) * per_byte, dtype=torch.int32)
    padded[: codes.numel()] = codes
    shifts = torch.arange(per_byte, dtype=torch.int32) * bits
    return (padded.view(-1, per_byte) << shifts).sum(1).to(torch.uint8)


def unpack(packed: torch.Tensor, bits: int, numel: int) -> torch.Tensor:
    """The inverse of :func:`pack`: ``uint8 [nbytes]`` to ``int32 [numel]``."""
    shifts = torch.arange(8 // bits, dtype=torch.int32) * bits
    codes = (packed.to(torch.int32)[:, None] >> shifts) & (2**bits - 1)
    return codes.flatten()[:numel]


def as_bytes(codes: np.ndarray) -> np.ndarray:
    """Codes of any dtype as ``uint8``; without a copy where they are bool."""
    return codes.view(np.uint8) if codes.dtype == np.bool_ else codes.astype(np.uint8, copy=False)


def pack_host(codes: np.ndarray, bits: int, packed: np.ndarray) -> None:
    """``uint8 [numel]`` codes into ``packed``, ``uint8 [packed_nbytes(numel, bits)]``, in place."""
    if bits == 8:
        packed[:] = codes
    elif bits == 1:
        packed[:] = np.packbits(codes, bitorder="little")
    else:
        per_byte = 8 // bits
        whole = codes.size // per_byte
        lanes = codes[: whole * per_byte].reshape(whole, per_byte)
        np.copyto(packed[:whole], lanes[:, 0])
        for lane in range(1, per_byte):
            packed[:whole] |= lanes[:, lane] << (lane * bits)
        if whole < packed.size:
            rest = codes[whole * per_byte :].astype(np.uint32)
            packed[whole] = int((rest << (np.arange(rest.size, dtype=np.uint32) * bits)).sum())


def unpack_host(packed: np.ndarray, bits: int, codes: np.ndarray) -> None:
    """The inverse of :func:`pack_host`: ``packed`` into ``codes``, ``uint8 [numel]``, in place."""
    if bits == 8:
        codes[:] = packed
    elif bits == 1:
        codes[:] = np.unpackbits(packed, count=codes.size, bitorder="little")
    else:
        per_byte = 8 // bits
        for lane in range(per_byte):
            every = codes[lane::per_byte]
            np.right_shift(packed[: every.size], lane * bits, out=every)
            every &= np.uint8(2**bits - 1)


@triton.jit
def pack_bits(codes, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``int32 [ROWS, COLUMNS]`` codes to ``uint8 [ROWS, COLUMNS * BITS // 8]``; sums inside a thread's own vector."""
    if BITS == 8:
        return codes.to(tl.uint8)
    else:
        PER_BYTE: tl.constexpr = 8 // BITS
        lanes = tl.reshape(codes, (ROWS, COLUMNS // PER_BYTE, PER_BYTE))
        shifts = tl.arange(0, PER_BYTE) * BITS
        return tl.sum(lanes << shifts[None, None, :], axis=2).to(tl.uint8)


@triton.jit
def unpack_bits(packed, BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """``uint8 [ROWS, COLUMNS * BITS // 8]`` to ``int32 [ROWS, COLUMNS]`` codes."""
    if BITS == 8:
        return packed.to(tl.int32)
    else:
        PER_BYTE: tl.constexpr = 8 // BITS
        shifts = tl.arange(0, PER_BYTE) * BITS
        lanes = (packed.to(tl.int32)[:, :, None] >> shifts[None, None, :]) & (2**BITS - 1)
        return tl.reshape(lanes, (ROWS, COLUMNS))
