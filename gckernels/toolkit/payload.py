"""Payload layout: a status word, then fields, each on a 16-byte boundary, little endian, zero padded.

Every payload of a compressor that is not summable starts with a 16-byte header whose first four bytes are the status
word. An encoder writes ``STATUS_OK``; a decoder that finds anything else (a lost, truncated or foreign payload)
decodes the whole payload to NaN, so that every rank sees the fault and a loss scaler skips the step. Inf and NaN in
the gradient travel in the fields themselves, as a NaN statistic, so an encoder needs no second pass to report them.

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
STATUS_OK = 0x31434B47  # "GKC1" read as a little-endian 32-bit integer: a mark and the version of the layout


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Field:
    """One array in a payload: ``count`` values of ``dtype`` from byte ``offset`` on."""

    name: str
    dtype: torch.dtype
    count: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes the field takes, padding included: a multiple of 16."""
        return round_up(self.count * self.dtype.itemsize, ALIGN_NBYTES)


@dataclass(frozen=True)
class Layout:
    """The fields of one payload."""

    fields: tuple[Field, ...]
    nbytes: int

    @staticmethod
    def of(*fields: tuple[str, torch.dtype, int]) -> Layout:
        """Lay out ``(name, dtype, count)`` one after the other behind the header."""
        placed = []
        offset = HEADER_NBYTES
        for name, dtype, count in fields:
            placed.append(Field(name, dtype, count, offset))
            offset += placed[-1].nbytes
        return Layout(tuple(placed), offset)

    @staticmethod
    def nbytes_of(*fields: tuple[str, torch.dtype, int]) -> int:
        """``Layout.of(*fields).nbytes`` by integer arithmetic alone, which ``torch.compile`` can do with symbols."""
        nbytes = HEADER_NBYTES
        for _, dtype, count in fields:
            nbytes += round_up(count * dtype.itemsize, ALIGN_NBYTES)
        return nbytes

    def __getitem__(self, name: str) -> Field:
        return next(field for field in self.fields if field.name == name)

    def view(self, payload: torch.Tensor, name: str) -> torch.Tensor:
        """Field ``name`` of ``payload`` (``[..., nbytes]``), without padding, as ``[..., count]`` of its dtype."""
        field = self[name]
        stop = field.offset + field.count * field.dtype.itemsize
        return payload[..., field.offset : stop].view(field.dtype)

    def zero_tail(self, payload: torch.Tensor, name: str, used: int) -> None:
        """Zero what lies behind the first ``used`` values of field ``name``, padding included (``[..., nbytes]``)."""
        field = self[name]
        payload[..., field.offset + used * field.dtype.itemsize : field.offset + field.nbytes] = 0

    def new(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """A payload with a good status word and all fields zero, for the references."""
        payload = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)
        payload[:4].view(torch.int32)[0] = STATUS_OK
        return payload


def store_floats(field: torch.Tensor, values: torch.Tensor) -> None:
    """Store fp32 ``values`` in a field of fp32 or bf16, every NaN as the quiet one with the sign bit clear.

    Which NaN torch makes of a NaN in bf16 depends on how many values it converts at once; equal values must be equal
    bytes.
    """
    field.copy_(values)
    if field.dtype == torch.bfloat16:
        field.view(torch.int16).masked_fill_(values.isnan(), 0x7FC0)
    else:
        field.masked_fill_(values.isnan(), torch.nan)


def write_header(payload: torch.Tensor) -> None:
    """Write the status word and the header's zeros into ``payload`` (``[..., nbytes]``)."""
    header = payload[..., :HEADER_NBYTES].view(torch.int32)
    header[..., 0] = STATUS_OK
    header[..., 1:] = 0


def status_ok(payload: torch.Tensor) -> torch.Tensor:
    """Whether each payload of ``[..., nbytes]`` has a good status word, as ``bool [...]``."""
    return payload[..., :4].view(torch.int32)[..., 0] == STATUS_OK
