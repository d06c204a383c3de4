"""Errors of collectives name the rank that has not taken part, the step, and the parameters, with every front end."""

from __future__ import annotations

import functools
import os
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from ddp_models import attached
from gckernels import sync
from gckernels.batch import Bound
from gckernels.sync.communication import reports
from gckernels.sync.communication.reports import Word, described
from gckernels.sync.frontends.updates import updates_frontend, updates_state
from gckernels.sync.frontends.updates.anchors import Anchors
from gckernels.sync.frontends.updates.lineage import Lineage
from gckernels.sync.frontends.updates.round_buffers import RoundBuffers
from gckernels.sync.frontends.updates.sent_states import SentState
from gckernels.sync.frontends.updates.step_scales import StepScales
from leftovers import lanes
from models import build
from ranks import run_ranks

pytestmark = pytest.mark.host_only("collectives of a device do not raise where they are issued")

FAULTY, AT = 1, 3
LATE_S, PATIENT_S, TIMEOUT_S = 4.0, 60.0, 120.0
SLOW = pytest.mark.slow


def error_of(front: str, fault: str) -> str | None:
    """Train until a step fails, and return the error. The faulty rank does what ``fault`` names before one step."""
    rank, module = dist.get_rank(), build("Mlp")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    model: Any = module
    if front == "fsdp":
        for layer in module.layers:
            if isinstance(layer, torch.nn.Linear):
                fully_shard(layer)
        attachment = sync.attach(fully_shard(module), "EFSignSGD")
    elif front == "updates":
        attachment = sync.attach(module, sync.Updates(optimizer, "EFSignSGD", every=1))
    else:
        model, attachment = attached(front, module, "EFSignSGD")
    for step in range(AT + 3):
        dist.barrier()  # all ranks have finished the step before
        if rank == FAULTY and step == AT:
            if fault == "broken":
                Bound.__call__ = _broken
            elif fault == "elsewhere":
                attachment._frontend.runtime.is_draining = True  # another kind of message
            else:
                _FAULTS[fault]()
        try:
            model(module.batch(step, rank)).backward()
            if front == "updates":
                optimizer.step()
        except RuntimeError as error:
            time.sleep(2 * reports.PATIENCE_S)  # the others, which have failed as well, find this rank
            attachment.close()
            lanes(within_s=TIMEOUT_S)
            return str(error)
    return None


def _broken(bound: Bound) -> None:
    raise ArithmeticError("the codec is broken")


_FAULTS = {
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "ends": lambda: os._exit(0),
    "asleep": lambda: time.sleep(TIMEOUT_S),
    "late": lambda: time.sleep(2.5 * LATE_S),
}
_LATE = ("asleep", "late", "elsewhere")


def _errors(front: str, fault: str, world_size: int = 3) -> list[str]:
    outcomes = run_ranks(
        world_size,
        error_of,
        front,
        fault,
        group_timeout_s=LATE_S if fault in _LATE else PATIENT_S,
        timeout_s=TIMEOUT_S,
        fresh=True,
        exits=False,
        wait_for=[rank for rank in range(world_size) if rank != FAULTY] if fault == "asleep" else None,
    )
    return [outcome.value or outcome.error_text for outcome in outcomes]


def _names(error: str) -> bool:
    return any(name in error for name in ("layers.0", "layers.2", "layers.4"))


@pytest.mark.parametrize(
    ("front", "fault"),
    [
        ("hook", "killed"),
        pytest.param("module", "killed", marks=SLOW),
        pytest.param("fsdp", "killed", marks=SLOW),
        pytest.param("updates", "killed", marks=SLOW),
        pytest.param("hook", "ends", marks=SLOW),
        pytest.param("hook", "asleep", marks=SLOW),
        ("module", "asleep"),
        pytest.param("fsdp", "asleep", marks=SLOW),
        pytest.param("updates", "asleep", marks=SLOW),
    ],
)
def test_a_rank_that_is_missing_is_named(front, fault):
    for rank, error in enumerate(_errors(front, fault)):
        if rank != FAULTY:
            assert error.startswith("gckernels: "), error
            # on a busy machine another rank may not have said in time that it fails as well
            assert re.search(r"rank(s 0,|s)? 1(, 2)? ha(s|ve) not sent its part of ", error) and _names(error), error
            assert ("said nothing" if fault == "asleep" else "the connection is closed") in error, error
            assert front == "fsdp" or f"in step {AT}" in error, error


@pytest.mark.parametrize("front", [pytest.param(front, marks=SLOW) for front in ("hook", "module", "fsdp", "updates")])
def test_a_rank_that_comes_too_late_is_told_who_has_given_up(front):
    errors = _errors(front, "late")
    assert "rank 1 came too late to " in errors[FAULTY] and "given up waiting" in errors[FAULTY], errors[FAULTY]
    assert _names(errors[FAULTY])


@pytest.mark.parametrize("front", ["hook", pytest.param("module", marks=SLOW), pytest.param("updates", marks=SLOW)])
def test_ranks_that_wait_for_different_messages_are_told_where_the_others_are(front):
    errors = _errors(front, "elsewhere", world_size=2)
    for rank, error in enumerate(errors):
        own, other = ("Average", "AllGather") if rank == FAULTY else ("AllGather", "Average")
        assert f"rank {1 - rank} has not sent its part of " in error and f"({own}) in step {AT}" in error, error
        assert f"rank {1 - rank} is in {other} of " in error and _names(error), error


@pytest.mark.parametrize("front", ["hook", pytest.param("module", marks=SLOW), pytest.param("updates", marks=SLOW)])
def test_the_error_of_a_rank_is_told_to_the_others(front):
    errors = _errors(front, "broken")
    assert errors[FAULTY].endswith(": ArithmeticError: the codec is broken")
    for rank in (0, 2):
        assert f"rank 1 has failed in step {AT}: ArithmeticError: the codec is broken" in errors[rank], errors[rank]


# -------------------------------------------------------------------- collectives of updates that belong to no message

_BESIDE = {
    "attach: the broadcast of parameters": (updates_state, "Members"),
    "the mean of the sums for factors of steps": (StepScales, "measure"),
    "the mean of buffers": (RoundBuffers, "send"),
    "the comparison of frozen parameters": (updates_frontend, "on_any_rank"),
    "regroup: the comparison of rounds": (Lineage, "newest"),
    "regroup: the plan of the rank with the newest parameters": (updates_frontend, "broadcast_text"),
    "regroup: the parameters of the last round": (Anchors, "receive"),
    "regroup: the state of the outer optimizer": (SentState, "received"),
    "regroup: the buffers": (RoundBuffers, "receive"),
}
"""The part that the faulty rank does not do any more, by the collective in which others wait for it then."""


def error_beside_messages(what: str) -> str:
    module = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(module.parameters())
    outer, made = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9), list[sync.Attachment]()

    def train() -> None:
        attachment = sync.attach(
            module, sync.Updates(optimizer, every=2, plan="EFSignSGD", outer=outer, scale_steps=True)
        )
        made.append(attachment)
        for step in range(4):
            if step == 3:
                module[0].requires_grad_(False)
            module(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        attachment.regroup(range(dist.get_world_size()))

    def leave(*_: Any) -> None:
        time.sleep(2)  # messages that are on their way arrive
        os._exit(0)

    if dist.get_rank() == FAULTY:
        setattr(*_BESIDE[what], leave)
    with pytest.raises(RuntimeError) as caught:
        train()
    for attachment in made:
        attachment.close()
    lanes(within_s=TIMEOUT_S)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("what", _BESIDE)
def test_a_rank_that_is_missing_beside_messages_is_named(what):
    outcomes = run_ranks(2, error_beside_messages, what, timeout_s=TIMEOUT_S, fresh=True, exits=False)
    error = outcomes[0].value or str(outcomes[0])
    # the faulty rank has not sent the messages behind these sums, for which the other one may wait first
    events = (f"{what} failed", *["synchronisation failed"] * ("sums" in what))
    assert error.startswith(tuple(f"gckernels: {event}: rank 1 has not sent its part of " for event in events)), error


# -------------------------------------------------------------------- no store, no word


def error_without_a_store() -> str | None:
    """The error of a training whose store does not answer."""
    module = build("Mlp")
    model, attachment = attached("module", module, "EFSignSGD")
    model(module.batch(0, dist.get_rank())).backward()
    dist.barrier()
    if dist.get_rank() == FAULTY:
        os._exit(0)
    asked: list[str] = []

    def gone() -> Any:
        asked.append("store")
        raise dist.DistNetworkError("Connection reset by peer")

    reports._own_store = gone
    with pytest.raises(RuntimeError) as caught:
        model(module.batch(1, dist.get_rank())).backward()
    assert asked == ["store"]
    attachment.close()
    lanes(within_s=TIMEOUT_S)
    return str(caught.value)


def test_an_error_says_what_is_known_without_the_store():
    outcomes = run_ranks(2, error_without_a_store, timeout_s=TIMEOUT_S, fresh=True, exits=False)
    error = outcomes[0].value or str(outcomes[0])
    assert "rank 1 has not sent its part of layers" in error and "does not answer" in error, outcomes[0]
    assert "RuntimeError: " in error  # the transport's own words stay


CLOSED, TIMED_OUT = RuntimeError("Connection closed by peer [::1]"), RuntimeError("Timed out waiting 3000ms for recv")


def word(rank: int, error: Exception, what: str = "AllToAll", step: int = 7, peer: int = -1) -> Word:
    if peer >= 0:
        setattr(error, reports.PEER, peer)
    return Word.of(rank, what, ["a", "b", "c", "d"], step, error)


def test_what_is_said_of_a_failure():
    own = word(0, RuntimeError(str(TIMED_OUT)))
    part = "its part of a, b, c and 1 more (AllToAll) in step 7"
    assert described(own, {}, [1, 2], True).startswith(f"ranks 1, 2 have not sent {part}, and said nothing")
    assert "does not answer" in described(own, {}, [1], False)
    both = {1: word(1, RuntimeError(str(TIMED_OUT)))}
    assert described(own, both, [1], True) == (
        "no rank has got all of AllToAll of a, b, c and 1 more in step 7, though all of them wait there"
    )
    moved = {1: word(1, RuntimeError(str(TIMED_OUT)), "Average", 9)}
    assert described(own, moved, [1], True) == (
        f"rank 1 has not sent {part}; rank 1 is in Average of a, b, c and 1 more in step 9"
    )
    # rank 2 has seen that rank 1 is gone, which rank 0 has only waited for through rank 2
    seen = {2: word(2, RuntimeError(str(CLOSED)), peer=1)}
    assert described(own, seen, [1, 2], True).startswith(f"rank 1 has not sent {part}: the connection is closed")
    # connections that other ranks have closed when they gave up say nothing of a silent rank
    after = {2: word(2, RuntimeError(str(CLOSED)), peer=0)}
    assert described(own, after, [1, 2], True).startswith(f"rank 1 has not sent {part}, and said nothing")
    closed = word(2, RuntimeError(str(CLOSED)), peer=0)
    assert described(closed, {0: own}, [0, 1], True).startswith(f"rank 1 has not sent {part}, and said nothing")
    assert described(closed, {0: own, 1: own}, [0, 1], True).startswith("rank 2 came too late to AllToAll of a, b, c")
    broken = {1: word(1, ArithmeticError("broken"), what="")}
    assert described(closed, broken, [0, 1], True) == "rank 1 has failed in step 7: ArithmeticError: broken"


@pytest.mark.parametrize("text", [b"", b"[]", b"nothing", b'{"rank": 1}', b'{"rank": "x"}', b"9" * 5000, b"\xff\xfe"])
def test_a_damaged_word_is_none(text):
    assert Word.read(text) is None
