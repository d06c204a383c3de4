"""Faults while a training is tuned: a rank that dies lets all others raise, one that lags is waited for."""

from __future__ import annotations

import os
import signal
import time
from unittest import mock

import pytest
import torch.distributed as dist

import gckernels
from gckernels.planner import proposer
from gckernels.planner.predictive import searching
from gckernels.planner.predictive.planning import Proposal
from gckernels.sync.frontends.changes import PlanChanges
from gckernels.sync.tracing.model_tracer import ModelTracer
from gckernels.sync.tuning import recording, uniform_candidates
from gckernels.sync.tuning.trials import race
from models import build
from ranks import run_ranks, values_of
from tunings import PLAIN, policy_of, proposal_of, scripted, train, tuned_handle

SPECS = {"four": "BlockQuant(bits=4)"}
TIMES_S = {PLAIN: 1.0, "four": 0.5, "eight": 0.7}
POINTS = {
    "recorder": (recording, "ModelTracer"),
    "errors": (ModelTracer, "errors"),
    "trace": (ModelTracer, "trace"),
    "candidates": (uniform_candidates, "candidates"),
    "turn": (race, "of_all_ranks"),
    "proposal": (searching, "proposal"),
    "reading": (Proposal, "from_text"),
    "change": (PlanChanges, "follow"),
}
"""The function that is called at each point of the sequence."""


def _dies(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)


def predicted(*_):
    return Proposal(proposal_of(build("Mlp"), {"eight": "BlockQuant"}, 2))


def until_gone(point, where):
    """Train until a rank raises, in ``attach`` or in a step; the rank ``where`` dies at a point or a step."""
    module, handles = build("Mlp"), []
    dist.barrier()
    with scripted(module, SPECS, TIMES_S, handles, predicted):
        patches = []
        if dist.get_rank() == where and point in POINTS:
            patches.append(mock.patch.object(*POINTS[point], _dies))
        for patch in patches:
            patch.start()
        try:
            model, handle = tuned_handle("ddp", module, propose=proposer)
            handles.append(handle)
            step_of_death = int(point) if point.isdigit() and dist.get_rank() == where else None
            train(model, module, range(60), lambda step: _dies() if step == step_of_death else None)
        except RuntimeError as error:
            for handle in handles:
                handle.close()
            return str(error)
        finally:
            for patch in patches:
                patch.stop()
    return None


@pytest.mark.parametrize(
    ("point", "where"),
    [
        pytest.param("recorder", 1, marks=pytest.mark.slow),
        ("2", 1),  # plain steps
        pytest.param("12", 1, marks=pytest.mark.slow),  # recorded ones
        ("errors", 1),
        pytest.param("trace", 1, marks=pytest.mark.slow),
        ("candidates", 0),
        pytest.param("turn", 1, marks=pytest.mark.slow),
        ("proposal", 0),
        pytest.param("reading", 1, marks=pytest.mark.slow),
        ("change", 1),
        pytest.param("25", 0, marks=pytest.mark.slow),  # trials
    ],
)
def test_when_a_rank_dies_the_others_raise(point, where):
    times = {"group_timeout_s": 10.0, "timeout_s": 100.0}
    outcomes = run_ranks(2, until_gone, point, where, **times, fresh=True, exits=False)
    assert (outcomes[where].error_type, outcomes[where].exit_code) == ("ProcessDied", -signal.SIGKILL)
    other = outcomes[1 - where]
    assert other.error_type is None and other.value, other  # the text of the exception


def with_a_slow_rank(point, where):
    module, handles = build("Mlp"), []
    owner, name = POINTS[point]
    original = getattr(owner, name)

    def late(*arguments, **keywords):
        time.sleep(0.5)
        return original(*arguments, **keywords)

    with scripted(module, SPECS, TIMES_S, handles, predicted):
        original = getattr(owner, name)
        with mock.patch.object(owner, name, late if dist.get_rank() == where else original):
            model, handle = tuned_handle("ddp", module, propose=proposer)
            handles.append(handle)
            seen = train(model, module, range(80), lambda _: policy_of(handle))
    handle.close()
    return seen


@pytest.mark.parametrize(
    ("point", "where"),
    [
        ("errors", 1),
        *(
            pytest.param(point, where, marks=pytest.mark.slow)
            for point, where in (
                ("recorder", 1),
                ("trace", 0),
                ("candidates", 1),
                ("proposal", 0),
                ("reading", 1),
                ("change", 1),
            )
        ),
    ],
)
def test_a_rank_that_lags_is_waited_for(point, where):
    first, second = values_of(run_ranks(2, with_a_slow_rank, point, where))
    assert first == second and first[-1] == "four"


def refused(kind):
    other = dist.get_rank() == 1
    version = mock.patch.object(gckernels, "__version__", "0.0.1" if kind == "version" and other else "0.1.0")
    with version, pytest.raises((RuntimeError, ValueError)) as caught:
        if kind == "steps":
            tuned_handle("ddp", build("Mlp"), steps=1000 + other)
        elif kind == "rule":
            tuned_handle("ddp", build("Mlp"), accuracy="fast" if other else "safe")
        elif kind == "aggressive":
            tuned_handle("ddp", build("Mlp"), accuracy="aggressive")
        else:
            tuned_handle("ddp", build("Mlp"))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("version", "do not have the same settings"),
        ("steps", "do not have the same settings"),
        ("rule", "accuracy must be"),
        ("aggressive", "steps="),
    ],
)
def test_other_settings_and_versions_are_refused_on_all_ranks(kind, part):
    for message in values_of(run_ranks(2, refused, kind)):
        assert part in message
