"""When a rank dies, stops or leaves, all others raise an exception in time, and their processes can end."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_models import attached
from gckernels import BlockQuant, EFSignSGD, sync
from gckernels.batch import Bound, Decoding, Encoding
from gckernels.sync import attach
from leftovers import lanes
from models import SMALL_BUCKETS, build
from ranks import Outcome, run_ranks, values_of

pytestmark = pytest.mark.host_only("collectives of a device do not raise where they are issued")

GROUP_TIMEOUT_S = 3.0
SLACK_S = 20.0  # allows for a busy machine; a hang would last for ever
FAULTY = 1
SLOW = pytest.mark.slow

CAUSES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")


@dataclass(frozen=True)
class Seen:
    """A rank's observations of another rank's fault.

    Attributes:
        step: the training step that raised.
        seconds: time from the start of that step until it raised.
        error: the step's error.
        next_errors: errors of the two attempts after it.
        close_seconds: time that closing the attachment took.
        threads: names of the threads left after closing.
    """

    step: int
    seconds: float
    error: str
    next_errors: list[str]
    close_seconds: float
    threads: list[str]


def train_until_a_fault(fault: str, at_step: int, program: str, front: str) -> Seen | None:
    """Train until a step fails: the faulty rank does what ``fault`` names, and the others return their observations."""
    rank = dist.get_rank()
    module = build("Mlp")
    hooked, attachment = attached(front, module, sync.uniform_plan(module, EFSignSGD(), program=program))
    dist.barrier()  # all are connected: an earlier death would break connections that others still open
    before = set(threading.enumerate()) - {t for t in threading.enumerate() if t.name.startswith("gckernels")}
    for step in range(at_step + 5):
        batch = module.batch(step, rank)
        started = time.monotonic()
        try:
            if rank == FAULTY and step == at_step:
                _FAULTS[fault]()
            hooked(batch).backward()
        except RuntimeError as error:
            seconds = time.monotonic() - started
            next_errors = [_error_of(hooked, batch) for _ in range(2)]
            started = time.monotonic()
            attachment.close()
            close_seconds = time.monotonic() - started
            lanes(within_s=SLACK_S)
            left = [thread.name for thread in threading.enumerate() if thread not in before]
            return Seen(step, seconds, str(error), next_errors, close_seconds, left)
    return None


def _error_of(hooked: torch.nn.Module, batch: Any) -> str:
    with pytest.raises(RuntimeError) as caught:
        hooked(batch).backward()
    return str(caught.value)


def _leave() -> None:
    raise ValueError("this rank has no more data")


_FAULTS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "asleep": lambda: time.sleep(1000),
    "leaves": _leave,
    "exits": lambda: os._exit(3),
}


@pytest.mark.parametrize(
    ("world_size", "fault", "at_step", "program", "front"),
    [
        (2, "killed", 4, "alltoall", "hook"),
        (3, "killed", 0, "allgather", "hook"),  # in the first step, which is not compressed
        pytest.param(3, "killed", 3, "alltoall", "hook", marks=SLOW),
        pytest.param(2, "stopped", 4, "allgather", "hook", marks=SLOW),  # as long as the group's timeout
        pytest.param(3, "stopped", 3, "alltoall", "hook", marks=SLOW),
        pytest.param(2, "asleep", 0, "alltoall", "hook", marks=SLOW),
        pytest.param(2, "leaves", 3, "allgather", "hook", marks=SLOW),
        pytest.param(3, "leaves", 4, "alltoall", "hook", marks=SLOW),
        pytest.param(2, "exits", 4, "alltoall", "hook", marks=SLOW),
        pytest.param(3, "killed", 3, "alltoall", "module", marks=SLOW),
        pytest.param(2, "stopped", 4, "allgather", "module", marks=SLOW),
        pytest.param(2, "leaves", 2, "parameter_server", "module", marks=SLOW),
        (2, "asleep", 3, "alltoall", "module"),
        (4, "exits", 3, "alltoall", "module"),
    ],
)
def test_every_other_rank_raises_in_time_and_can_end(world_size, fault, at_step, program, front):
    hangs = fault in ("stopped", "asleep")
    outcomes = run_ranks(
        world_size,
        train_until_a_fault,
        fault,
        at_step,
        program,
        front,
        group_timeout_s=GROUP_TIMEOUT_S,
        timeout_s=GROUP_TIMEOUT_S + 3 * SLACK_S,
        fresh=True,
        wait_for=[rank for rank in range(world_size) if rank != FAULTY] if hangs else None,
    )
    faulty = outcomes.pop(FAULTY)
    for outcome in outcomes:
        _check(outcome, at_step)
    match fault:
        case "killed":
            assert (faulty.error_type, faulty.exit_code) == ("ProcessDied", -signal.SIGKILL)
        case "stopped" | "asleep":
            assert (faulty.error_type, faulty.exit_code) == ("StillRunning", -signal.SIGKILL)
        case "leaves":
            assert (faulty.error_type, faulty.error_text) == ("ValueError", "this rank has no more data")
            assert faulty.exit_code == 0  # its lanes do not keep the process alive
        case "exits":
            assert (faulty.error_type, faulty.exit_code) == ("ProcessDied", 3)


def _check(outcome: Outcome, at_step: int) -> None:
    assert outcome.error_type is None, outcome
    seen = outcome.value
    assert seen is not None, "no error was raised"
    assert seen.step == at_step
    assert seen.seconds < GROUP_TIMEOUT_S + SLACK_S
    # "failed before" if the first bucket failed before the second was full
    assert seen.error.startswith("gckernels: synchronisation failed")
    assert any(cause in seen.error for cause in CAUSES), seen.error
    if at_step > 0:  # after a failed first step DDP fails next in its own collective
        for error in seen.next_errors:
            assert error.startswith("gckernels: synchronisation failed before: ")
            assert ": RuntimeError: " in error and any(cause in error for cause in CAUSES), error
    assert seen.close_seconds < GROUP_TIMEOUT_S + SLACK_S
    assert seen.threads == []
    assert outcome.exit_code == 0  # the process ended by itself


# -------------------------------------------------------------------- an error in a lane of one rank


def train_with_an_error_in_a_lane(method: str, front: str) -> tuple[str, str]:
    rank = dist.get_rank()
    module = build("Mlp")
    hooked, attachment = attached(front, module, sync.uniform_plan(module, BlockQuant(), program="alltoall"))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError) as caught:
        for step in range(6):
            if rank == FAULTY and step == 3:
                patch.setattr(Bound, "__call__", functools.partialmethod(_broken, method, Bound.__call__))
            hooked(module.batch(step, rank)).backward()
    first, then = str(caught.value), _error_of(hooked, module.batch(6, rank))
    assert type(caught.value.__cause__).__name__ in first  # the lane's error, whose traceback shows the cause
    attachment.close()
    assert not lanes(within_s=SLACK_S)
    return first, then


def _broken(bound: Bound, method: str, call: Any) -> None:
    if any(isinstance(unit, _UNITS[method]) for unit in bound._units):
        raise ArithmeticError("the codec is broken")
    call(bound)


_UNITS = {"encode": Encoding, "decode": Decoding}


@pytest.mark.host_only("nothing is used on a device after an error")
@pytest.mark.parametrize("front", ["hook", "module"])
@pytest.mark.parametrize("method", ["encode", "decode"])
def test_an_error_of_one_rank_ends_all(method, front):
    times = {"group_timeout_s": GROUP_TIMEOUT_S, "timeout_s": 3 * SLACK_S}
    found = values_of(run_ranks(2, train_with_an_error_in_a_lane, method, front, **times))
    first, then = found[FAULTY]
    assert first.startswith("gckernels: synchronisation failed")  # may contain "before", as above
    assert first.endswith(": ArithmeticError: the codec is broken")
    assert then == "gckernels: synchronisation failed before: ArithmeticError: the codec is broken"
    first, then = found[1 - FAULTY]
    assert first.startswith("gckernels: synchronisation failed") and any(cause in first for cause in CAUSES)
    assert then.startswith("gckernels: synchronisation failed before: ")


# -------------------------------------------------------------------- attach


def attach_alone(front: str) -> str:
    module = build("Mlp")
    hooked = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    if dist.get_rank() == FAULTY:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as caught:
        if front == "hook":
            attach(hooked, BlockQuant())
        else:
            attach(module, BlockQuant())
    return str(caught.value)


@pytest.mark.parametrize("front", ["hook", "module"])
def test_attaching_raises_when_another_rank_is_gone(front):
    survivor, dead = run_ranks(2, attach_alone, front, group_timeout_s=GROUP_TIMEOUT_S, timeout_s=3 * SLACK_S)
    assert dead.exit_code == -signal.SIGKILL
    assert any(cause in survivor.value for cause in CAUSES), survivor
