"""The cost of an attachment that has found nothing to gain: a few functions at the end of a step."""

from __future__ import annotations

import statistics
import sys
from types import FrameType
from typing import Any

from gckernels.sync.tuning.trials.rules import STEPS
from models import build
from ranks import run_ranks, values_of
from tunings import PLAIN, scripted, train, tuned_handle

MOST = 34
"""Functions of the package in a step, which take some microseconds with what torch does for them."""


def functions_per_step() -> float:
    """The median number of functions of the package that a step calls after plain averaging has won."""
    module, handles, called, counts = build("Mlp"), [], [0], []

    def count(frame: FrameType, event: str, argument: Any) -> None:
        called[0] += event == "call" and "gckernels/sync/" in frame.f_code.co_filename

    def look(_: int) -> None:
        counts.append(called[0])
        called[0] = 0

    with scripted(module, {}, {PLAIN: 1.0}, handles):
        model, handle = tuned_handle("ddp", module)
        handles.append(handle)
        train(model, module, range(STEPS + 5), lambda _: None)
        sys.setprofile(count)
        train(model, module, range(30), look)
        sys.setprofile(None)
    handle.close()
    return statistics.median(counts)


def test_an_attachment_without_a_plan_does_little_in_a_step():
    for count in values_of(run_ranks(2, functions_per_step)):
        assert 0 < count <= MOST
