"""The host path of patches: the functions of :mod:`.reference`, from C. Without a compiler the reference runs."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import torch

from gckernels.toolkit.host.library import COMMON, VECTORS, defined, library
from gckernels.toolkit.host.sources import program_text
from gckernels.toolkit.host.structs import c_structs, pointer

from . import reference
from .errors import PatchError
from .kinds import BF16, BYTES, ElementKind

_ROOM = 7 * reference.CHUNK + 2**16
_kept = threading.local()
_KINDS = {torch.int16: BF16, torch.uint8: BYTES}  # any kinds of these sizes: a digest is of patterns
_REASONS = ("the rows do not fit", "classes do not ascend", "there are more entries than elements", "a subset or codes "
            "are cut off", "bytes are left", "a step is too long")  # fmt: skip


class _Call(ctypes.Structure):
    """The arguments of all functions, as ``call_t``."""

    _fields_ = (
        ("old", pointer(const=True)),  # bits [numel], bits_t in C
        ("new", pointer()),  # bits
        ("coded", pointer(ctypes.c_uint8)),
        ("positions", pointer(ctypes.c_int32)),
        ("room", pointer()),
        ("counts", pointer()),  # uint16
        ("numel", ctypes.c_int64),
        ("coded_nbytes", ctypes.c_int64),
        ("changed", ctypes.c_int64),
    )


def encode_changes(kind: ElementKind, old: torch.Tensor, new: torch.Tensor) -> tuple[bytes, torch.Tensor] | None:
    """See :func:`.reference.encode_changes`."""
    built, numel = build(kind), old.numel()
    if built is None:
        return reference.encode_changes(kind, old, new)
    room = _room()
    coded, positions = room[2 * _ROOM :].view(torch.uint8), room[_ROOM:]
    call = _call(old, new, positions, numel=numel, coded=coded.data_ptr(), room=room.data_ptr())
    nbytes = built.encode_changes(ctypes.byref(call))
    if nbytes < 0:
        return None
    return coded[:nbytes].numpy().tobytes(), positions[: call.changed].clone()


def decode_changes(kind: ElementKind, data: bytes, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`.reference.decode_changes`."""
    built, numel = build(kind), old.numel()
    if built is None:
        return reference.decode_changes(kind, data, old)
    room = _room()
    positions, values = room[_ROOM:], room[2 * _ROOM :].view(kind.bits_dtype)
    coded = _address(data)
    call = _call(old, values, positions, numel=numel, coded=coded, coded_nbytes=len(data), room=room.data_ptr())
    call.counts = room[2 * _ROOM + reference.CHUNK :].data_ptr()
    count = built.decode_changes(ctypes.byref(call))
    if count < 0:
        raise PatchError(_REASONS[-count - 1])
    return positions[:count].clone(), values[:count].clone()


def encode_dense(kind: ElementKind, bits: torch.Tensor) -> bytes:
    """See :func:`.reference.encode_dense`."""
    built = build(kind)
    if built is None:
        return reference.encode_dense(kind, bits)
    counts = torch.zeros(256, dtype=torch.int64, device="cpu")
    call = _call(bits, numel=bits.numel())
    built.count_classes(ctypes.byref(call), counts.data_ptr())
    width, table = reference.table_of(kind, counts[: 1 << kind.exponent_bits].tolist())
    if not width:
        return b"\0" + bits.view(torch.uint8).numpy().tobytes()
    coded = _room().view(torch.uint8)
    coded[: 1 + len(table)] = torch.tensor([width, *table], dtype=torch.uint8, device="cpu")
    call.coded = coded.data_ptr()
    return coded[: built.encode_dense(ctypes.byref(call))].numpy().tobytes()


def decode_dense(kind: ElementKind, data: bytes, numel: int) -> torch.Tensor:
    """See :func:`.reference.decode_dense`."""
    built = build(kind)
    if built is None or data[:1] == b"\0":
        return reference.decode_dense(kind, data, numel)
    bits = torch.empty(numel, dtype=kind.bits_dtype, device="cpu")
    call = _call(bits, bits, numel=numel, coded=_address(data), coded_nbytes=len(data), room=_room().data_ptr())
    if built.decode_dense(ctypes.byref(call)):
        raise PatchError("a chunk that was sent as a whole is damaged")
    return bits


def digest_of(bits: torch.Tensor, first: int) -> int:
    """See :func:`.reference.digest_of`."""
    built = build(_KINDS[bits.dtype])
    if built is None:
        return reference.digest_of(bits, first)
    return int(built.digest_of(ctypes.byref(_call(bits, numel=bits.numel())), first))


def digest_at(positions: torch.Tensor, bits: torch.Tensor, first: int) -> int:
    """See :func:`.reference.digest_at`."""
    built = build(_KINDS[bits.dtype])
    if built is None:
        return reference.digest_at(positions, bits, first)
    call = _call(bits, positions=positions, numel=bits.numel())
    return int(built.digest_at(ctypes.byref(call), first % 2**64))


def _room() -> torch.Tensor:
    """Memory for a call, of which parts are written: three of ``_ROOM`` numbers. Each thread keeps its own, because new
    memory costs as much time as a few changes."""
    if not hasattr(_kept, "room"):
        _kept.room = torch.empty(3 * _ROOM, dtype=torch.int32, device="cpu")
    room: torch.Tensor = _kept.room
    return room


def _call(
    old: torch.Tensor, new: torch.Tensor | None = None, positions: torch.Tensor | None = None, **more: Any
) -> _Call:
    call = _Call(old=old.data_ptr(), **more)
    if new is not None:
        call.new = new.data_ptr()
    if positions is not None:
        call.positions = positions.data_ptr()
    return call


def _address(data: bytes) -> int | None:
    """The address of bytes, which must outlive the call."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value


@functools.cache
def build(kind: ElementKind) -> Any:
    """The functions, compiled for elements of a kind; ``None`` if they cannot be compiled."""
    built: Any = library(program(kind))
    if built is not None:
        address, number = ctypes.c_void_p, ctypes.c_int64
        for function in (built.encode_changes, built.decode_changes, built.encode_dense, built.decode_dense):
            function.argtypes, function.restype = (address,), number
        built.count_classes.argtypes, built.count_classes.restype = (address, address), None
        for function in (built.digest_of, built.digest_at):
            function.argtypes, function.restype = (address, ctypes.c_uint64), ctypes.c_uint64
    return built


def program(kind: ElementKind) -> str:
    """The source of the C program for elements of a kind."""
    constants = {"MAX_LOW": reference.MAX_LOW, "MAX_WIDTH": reference.MAX_WIDTH, "ROW_BITS": reference.ROW_BITS}
    constants |= {"DENSE": reference.DENSE[0], "DENSE_OF": reference.DENSE[1]}
    constants |= {"NBYTES": kind.nbytes, "SHIFT": kind.shift, "EXPONENT_BITS": kind.exponent_bits}
    return "\n".join(
        (COMMON, VECTORS, defined(**constants), c_structs(call_t=_Call), program_text(__package__, "host.c"))
    )
