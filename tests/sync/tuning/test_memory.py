"""Memory of a tuned training: at most two plans' in trials, and the running plan's after them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from gckernels import sync
from gckernels.planner.predictive.planning import Proposal
from gckernels.planner.predictive.searching import Slices
from gckernels.sync.engine.runtime import Runtime
from gckernels.sync.tracing.gradients import KeptGradients
from gckernels.sync.tuning.trials.rules import STEPS
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from tunings import PLAIN, policy_of, scripted, train, tuned_handle

SPECS = {"four": "BlockQuant(bits=4)", "eight": "BlockQuant"}


def tensor_nbytes() -> int:
    """The bytes of all tensors that Python knows."""
    found = {}
    for each in gc.get_objects():
        if isinstance(each, torch.Tensor) and each.layout is torch.strided:
            storage = each.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def alive(*kinds: type) -> int:
    """The number of objects of these classes."""
    return sum(isinstance(each, kinds) for each in gc.get_objects())


def tuned(front: str, winner: str | None) -> tuple[int, int, int, int]:
    """The most runtimes in a training that is tuned, and what is left at its end: runtimes, parts of the tuning, bytes
    of tensors beyond those of before."""
    gc.collect()
    before, handles, most = tensor_nbytes(), [], 0
    module, step_s = build("Mlp"), {PLAIN: 1.0, "four": 1.1, "eight": 1.2} | ({winner: 0.5} if winner else {})
    with scripted(module, SPECS, step_s, handles):
        model, handle = tuned_handle(front, module)
        handles.append(handle)

        def look(step: int) -> None:
            nonlocal most
            gc.collect()
            most = max(most, alive(Runtime))

        train(model, module, range(STEPS + 5), look)
    assert policy_of(handle) == (winner or PLAIN)
    gc.collect()
    left = most, alive(Runtime), alive(KeptGradients, Slices, Proposal), tensor_nbytes() - before
    handle.close()
    return left


def attached(front: str, spec: str | None) -> int:
    """The bytes of tensors of a training with a plan from the beginning, beyond those of before."""
    gc.collect()
    before, module, handle = tensor_nbytes(), build("Mlp"), None
    plan = sync.uniform_plan(module, spec or "Identity", exempt=None)
    if front == "module":
        model: Any = module
        handle = sync.attach(module, plan)
    else:
        model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
        handle = sync.attach(model, plan)
    train(model, module, range(5), lambda _: None)
    gc.collect()
    left = tensor_nbytes() - before
    handle.close()
    return left


@pytest.mark.parametrize(
    ("front", "winner"),
    [
        ("ddp", "four"),
        pytest.param("ddp", None, marks=pytest.mark.slow),
        pytest.param("module", "four", marks=pytest.mark.slow),
    ],
)
def test_trials_leave_nothing_but_the_plan_that_has_won(front, winner):
    expected = values_of(
        run_ranks(2, attached, front, None if winner is None else SPECS[winner], fresh=True, exits=False)
    )
    found = values_of(run_ranks(2, tuned, front, winner, fresh=True, exits=False))
    for (most, runtimes, parts, nbytes), bare_nbytes in zip(found, expected, strict=True):
        assert most == 2 and runtimes == 1 and parts == 0
        assert nbytes <= 1.01 * bare_nbytes
