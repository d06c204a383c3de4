"""Files of safetensors: eight bytes with the size of a JSON header, the header, and the bytes of the tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

_DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class TensorFile:
    """The content of a file.

    Attributes:
        head: the first bytes, with the header.
        places: begin and end of each tensor behind the head, in ascending order.
        tensors: the tensors, in memory of their own.
    """

    head: bytes
    places: Mapping[str, tuple[int, int]]
    tensors: Mapping[str, torch.Tensor]

    def content(self) -> bytes:
        """The bytes of a file with the same header and the tensors as they are now."""
        return self.head + b"".join(
            self.tensors[name].view(-1).view(torch.uint8).numpy().tobytes() for name in self.places
        )


def read_tensors(path: str | Path) -> TensorFile:
    """The tensors of a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is damaged, or has a type that is not known.
    """
    data = Path(path).read_bytes()
    head_nbytes = 8 + int.from_bytes(data[:8], "little")
    if not 8 < head_nbytes <= len(data):
        raise ValueError("is no file of safetensors")
    try:
        header = json.loads(data[8:head_nbytes])
        header.pop("__metadata__", None)
        entries = sorted((*entry["data_offsets"], name, entry) for name, entry in header.items())
        at, places, tensors = 0, {}, {}
        for begin, end, name, entry in entries:
            dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
            if begin != at or end != begin + math.prod(shape) * dtype.itemsize or head_nbytes + end > len(data):
                raise ValueError(f"{name} is not where it must be")
            part = bytearray(data[head_nbytes + begin : head_nbytes + end])
            values = (
                torch.frombuffer(part, dtype=torch.uint8) if part else torch.empty(0, dtype=torch.uint8, device="cpu")
            )
            tensors[name], places[name], at = values.clone().view(dtype).view(shape), (begin, end), end
    except (AttributeError, KeyError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"is damaged, or has tensors of an unknown type: {type(error).__name__}: {error}") from None
    if head_nbytes + at != len(data):
        raise ValueError("is damaged: there are bytes behind the tensors")
    return TensorFile(data[:head_nbytes], places, tensors)
