"""When a rank dies between two launches of a plan, all others raise in time, and can close."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from gckernels import EFSignSGD, sync
from gckernels.sync import attach
from leftovers import lanes
from models import build
from ranks import run_ranks, values_of
from workloads import launched

pytestmark = pytest.mark.host_only("collectives of a device do not raise where they are issued")

GROUP_TIMEOUT_S = 3.0
SLACK_S = 20.0  # allows for a busy machine; a hang would last for ever
FAULTY, FAULTY_STEP = 1, 2
SLOW = pytest.mark.slow


def train_until_a_rank_dies(how: str, dies_at: str) -> tuple[int, float, list[str]]:
    """The step that raised, the seconds that it took, and the errors of the step and the next one."""
    rank, module = dist.get_rank(), build("Mlp")
    plan = launched(sync.uniform_plan(module, EFSignSGD(), exempt=None), how)
    attachment = attach(module, plan)
    step = 0

    def die(grad: torch.Tensor) -> None:
        if rank == FAULTY and step == FAULTY_STEP:
            os._exit(3)

    module.get_parameter(dies_at).register_hook(die)
    dist.barrier()  # all are connected: an earlier death would break connections that others still open
    errors: list[str] = []
    for step in range(FAULTY_STEP + 3):
        started = time.monotonic()
        try:
            module(module.batch(step, rank)).backward()
        except RuntimeError as error:
            seconds = time.monotonic() - started
            with pytest.raises(RuntimeError) as again:
                module(module.batch(step, rank)).backward()
            errors = [str(error), str(again.value)]
            break
        module.zero_grad()
    attachment.close()
    lanes(within_s=SLACK_S)
    return step, seconds, errors


@pytest.mark.parametrize(
    ("world_size", "how", "dies_at"),
    [
        (2, "each", "layers.0.weight"),  # in the last launch, the others are on their way
        pytest.param(2, "backwards", "layers.4.weight", marks=SLOW),  # before the first launch
        pytest.param(4, "messages", "layers.2.weight", marks=SLOW),
    ],
)
def test_a_rank_that_dies_between_launches(world_size, how, dies_at):
    alive = [rank for rank in range(world_size) if rank != FAULTY]
    outcomes = run_ranks(
        *(world_size, train_until_a_rank_dies, how, dies_at),
        **{"group_timeout_s": GROUP_TIMEOUT_S, "fresh": True, "wait_for": alive},
    )
    assert outcomes[FAULTY].exit_code == 3
    for step, seconds, (error, again) in values_of([outcomes[rank] for rank in alive]):
        assert step == FAULTY_STEP
        assert seconds < GROUP_TIMEOUT_S + SLACK_S
        assert error.startswith("gckernels: synchronisation failed")  # "before", if it failed before the next launch
        assert again.startswith("gckernels: synchronisation failed before: ")
