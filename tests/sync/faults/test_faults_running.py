"""Faults while a tuned plan runs and is watched: when a rank dies, the others raise."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from unittest import mock

import pytest
import torch.distributed as dist

from gckernels.sync.accuracy.accuracy import Accuracy
from gckernels.sync.tuning.watching import monitor, watching
from gckernels.sync.tuning.watching.monitor import Monitor
from models import build
from ranks import run_ranks
from tunings import PLAIN, scripted, train, tuned_handle

pytestmark = pytest.mark.host_only("collectives of a device do not raise where they are issued")

SPECS = {"four": "BlockQuant(bits=4)", "eight": "BlockQuant"}
TIMES_S = {PLAIN: 1.0, "four": 0.5, "eight": 0.7}
POINTS = {
    "window": (Monitor, "_ask"),
    "finer": (watching, "finer"),
}
"""The function that is called at each point."""


def dies(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def until_gone(point: str, where: int) -> str | None:
    """Train until a rank raises; the rank ``where`` dies at a point. Real steps are much faster than scripted ones, so
    the network seems to have changed."""
    module, handles = build("Mlp"), []
    dist.barrier()
    with contextlib.ExitStack() as patches:
        patches.enter_context(scripted(module, SPECS, TIMES_S, handles))
        patches.enter_context(mock.patch.object(watching, "Monitor", functools.partial(Monitor, window=4)))
        if point == "finer":
            patches.enter_context(mock.patch.object(Accuracy, "limit_of", lambda *_: 0.05))
            patches.enter_context(mock.patch.object(monitor, "READ_EVERY", 1))
            patches.enter_context(mock.patch.object(watching.Pace, "after", lambda pace, *_: (pace, None)))
        if dist.get_rank() == where:
            patches.enter_context(mock.patch.object(*POINTS[point], dies))
        try:
            model, handle = tuned_handle("ddp", module, accuracy=list(SPECS.values()))
            handles.append(handle)
            train(model, module, range(100), lambda _: None)
        except RuntimeError as error:
            for handle in handles:
                handle.close()
            return str(error)
    return None


@pytest.mark.parametrize(
    ("point", "where"),
    [
        ("window", 1),
        pytest.param("finer", 0, marks=pytest.mark.slow),
    ],
)
def test_when_a_rank_dies_the_others_raise(point, where):
    times = {"group_timeout_s": 10.0, "timeout_s": 100.0}
    outcomes = run_ranks(2, until_gone, point, where, **times, fresh=True, exits=False)
    assert (outcomes[where].error_type, outcomes[where].exit_code) == ("ProcessDied", -signal.SIGKILL)
    other = outcomes[1 - where]
    assert other.error_type is None and other.value, other  # the text of the exception
