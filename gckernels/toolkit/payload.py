"""Payload layout: a status word, then fields, each on a 16-byte boundary, little endian, zero padded.

Every payload of a compressor that is not summable starts with a 16-byte header whose first four bytes are the status
word. An encoder writes ``STATUS_OK``. A decoder that reads anything else (a lost, truncated or foreign payload) decodes
the whole payload to NaN, so that every rank sees the fault and a loss scaler skips the step. Inf and NaN in the
gradient are encoded in the fields themselves, as a NaN statistic, so an encoder needs no second pass to report them.

Example: ``Layout.of(("scales", torch.float32, 3), ("codes", torch.uint8, 21))``::

    bytes  0..3   status word 0x31434B47, the ASCII bytes "GKC1"
    bytes  4..15  zero
    bytes 16..27  scales, 3 x fp32
    bytes 28..31  zero
    bytes 32..52  codes, 21 x uint8
    bytes 53..63  zero                      nbytes == 64
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ALIGN_NBYTES = 16
HEADER_NBYTES = 16
STATUS_OK = 0x31434B47  # "GKC1" as a little-endian 32-bit integer: a magic number with the version of the layout


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Field:
    """One array in a payload: ``count`` values of ``dtype``, starting at byte ``offset``."""

    name: str
    dtype: torch.dtype
    count: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Size in bytes, padding included: a multiple of 16."""
        return round_up(self.count * self.dtype.itemsize, ALIGN_NBYTES)


@dataclass(frozen=True)
class PayloadLayout:
    """The fields of one payload."""

    fields: tuple[Field, ...]
    nbytes: int

    @staticmethod
    def of(*fields: tuple[str, torch.dtype, int]) -> PayloadLayout:
        """The layout with fields ``(name, dtype, count)`` one after the other, after the header."""
        placed = []
        offset = HEADER_NBYTES
        for name, dtype, count in fields:
            placed.append(Field(name, dtype, count, offset))
            offset += placed[-1].nbytes
        return PayloadLayout(tuple(placed), offset)

    @staticmethod
    def nbytes_of(*fields: tuple[str, torch.dtype, int]) -> int:
        """``Layout.of(*fields).nbytes``, by integer arithmetic that ``torch.compile`` can trace with symbolic sizes."""
        nbytes = HEADER_NBYTES
        for _, dtype, count in fields:
            nbytes += round_up(count * dtype.itemsize, ALIGN_NBYTES)
        return nbytes

    def __getitem__(self, name: str) -> Field:
        return next(field for field in self.fields if field.name == name)

    def view(self, payload: torch.Tensor, name: str) -> torch.Tensor:
        """A view of field ``name`` of ``payload`` ``[..., nbytes]``: ``[..., count]`` of its dtype, without padding."""
        field = self[name]
        stop = field.offset + field.count * field.dtype.itemsize
        return payload[..., field.offset : stop].view(field.dtype)

    def new(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """A new payload ``uint8 [nbytes]`` with a valid status word and all fields zero."""
        payload = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        payload[:4].view(torch.int32)[0] = STATUS_OK
        return payload


def store_floats(field: torch.Tensor, values: torch.Tensor) -> None:
    """Store fp32 ``values`` in a field of fp32 or bf16, every NaN as the quiet NaN with the sign bit clear.

    Equal values must be equal bytes, but torch converts NaN to different bf16 bits depending on the number of values.
    """
    field.copy_(values)
    if field.dtype == torch.bfloat16:
        field.view(torch.int16).masked_fill_(values.isnan(), 0x7FC0)
    else:
        field.masked_fill_(values.isnan(), torch.nan)


def status_ok(payload: torch.Tensor) -> torch.Tensor:
    """Whether each payload of ``[..., nbytes]`` has a valid status word, as ``bool [...]``."""
    return payload[..., :4].view(torch.int32)[..., 0] == STATUS_OK
