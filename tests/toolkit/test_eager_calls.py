"""A call for one tensor goes through few functions of the package: they take longer than a small tensor."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import gckernels
from gckernels.testing.configurations import DEFAULTS

PACKAGE = str(Path(gckernels.__file__).parent)
MOST = 60
"""Functions of the package in a call."""


def functions_in(work: Callable[[], object]) -> int:
    """The number of functions of the package that ``work`` calls when it is called again."""
    called = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal called
        called += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    work()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return called


@pytest.mark.parametrize("compressor", DEFAULTS.values(), ids=DEFAULTS)
def test_a_call_goes_through_few_functions(compressor):
    grad = torch.randn(1000)
    residual = torch.zeros(compressor.traits.states, 1000).squeeze(0)
    payload = gckernels.encode(compressor, grad)
    for work in (
        lambda: gckernels.encode(compressor, grad),
        lambda: gckernels.encode(compressor, grad, residual),
        lambda: gckernels.decode(compressor, payload, 1000),
    ):
        assert 0 < functions_in(work) <= MOST
