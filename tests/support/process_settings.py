"""Settings of a process or a caller for torch, as contexts; none of them may change what the package computes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Memory of ``torch.empty`` is filled, and operations whose results vary raise."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def everything() -> Iterator[None]:
    with default_dtype(torch.bfloat16), torch.device("meta"), deterministic(), torch.autocast("cpu", torch.bfloat16):
        yield


SETTINGS: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "another device": lambda: torch.device("meta"),  # stands for one whose memory the host cannot use
    "deterministic": deterministic,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "inference": torch.inference_mode,
    "everything": everything,
}
