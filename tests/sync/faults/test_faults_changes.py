"""When a rank dies while a plan changes, or does not change it, all others raise in time, and can close."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch.distributed as dist

from ddp_models import attached
from gckernels import EFSignSGD, sync
from leftovers import lanes
from models import build
from ranks import run_ranks, values_of

GROUP_TIMEOUT_S = 3.0
SLACK_S = 20.0  # allows for a busy machine; a hang would last for ever
FAULTY = 1
SLOW = pytest.mark.slow


def change_until_a_fault(front: str, point: str) -> str:
    """Train, change the plan, train on; return the error that ends it."""
    module, is_faulty = build("Mlp"), dist.get_rank() == FAULTY
    model, handle = attached(front, module, EFSignSGD())
    state = "training"

    def step() -> None:
        model(module.batch(0, dist.get_rank())).backward()
        module.zero_grad()

    def die(*_: Any) -> None:
        os._exit(3)

    for _ in range(3):
        step()
    try:
        if is_faulty and point == "before the change":
            die()
        if not (is_faulty and point == "another way"):
            handle.change_plan(sync.uniform_plan(model, EFSignSGD(), program="parameter_server"))
        if is_faulty and point == "in the exact step":
            module.get_parameter("layers.2.weight").register_hook(die)
        if is_faulty and point == "at its end":
            handle._changes._go_over = die
        if is_faulty and point == "after the change":
            handle.on_step_end(die)
        for _ in range(3):
            step()
    except RuntimeError as error:
        state = str(error)
    handle.close()
    lanes(within_s=SLACK_S)
    return state


POINTS = ("before the change", "in the exact step", "at its end", "after the change")


@pytest.mark.parametrize(
    ("front", "point"),
    [
        ("attach", "in the exact step"),
        *(
            pytest.param(front, point, marks=SLOW)
            for front in ("attach", "module")
            for point in POINTS
            if (front, point) != ("attach", "in the exact step")
        ),
    ],
)
def test_a_rank_that_dies_while_a_plan_changes(front, point):
    settings: dict[str, Any] = {"group_timeout_s": GROUP_TIMEOUT_S, "fresh": True, "wait_for": [0, 2]}
    outcomes = run_ranks(3, change_until_a_fault, front, point, **settings)
    assert outcomes[FAULTY].exit_code == 3
    for error in values_of([outcomes[0], outcomes[2]]):
        assert error != "training"


@pytest.mark.slow
@pytest.mark.parametrize("front", ["attach", "module"])
def test_a_rank_that_does_not_change_its_plan(front):
    """The collectives of the others fit none of its own, so after the timeout all ranks raise."""
    outcomes = run_ranks(2, change_until_a_fault, front, "another way", group_timeout_s=GROUP_TIMEOUT_S)
    for error in values_of(outcomes):
        assert error != "training"
