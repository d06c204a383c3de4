"""Plans that one rank cannot build, such as for want of memory: plain averaging goes on on all, with the same bits."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from gckernels import BlockQuant
from gckernels.sync.engine import runtime
from gckernels.sync.frontends.ddp.reducer import comm_hook
from gckernels.sync.plans.grouping import MessageSpec
from gckernels.sync.programs.stages import MessageKind
from gckernels.sync.tuning.trials import rules
from models import build
from ranks import run_ranks, values_of
from tunings import PLAIN, policy_of, scripted, train, tuned_handle
from workloads import digest_of

SPECS = {"four": "BlockQuant(bits=4)"}
STEPS = 40


def fails(*_: Any) -> Any:
    raise MemoryError("no room")


def without_room(spec: MessageSpec, *more: Any, **named: Any) -> Any:
    """A message, unless it compresses."""
    return fails() if spec.kind is not MessageKind.IN_PLACE else build_message(spec, *more, **named)


build_message = runtime.build_message
PARTS = {"build_message": without_room, "DeviceLanes": fails, "compile_host": fails}
"""Functions that build parts of a plan, and what takes their place."""


def trained(front: str, part: str, where: int, is_tuned: bool) -> Any:
    """Digests and plans of the steps of a training in which a rank cannot build a plan, and its decisions."""
    module, handles = build("Mlp"), []
    with scripted(module, SPECS, {PLAIN: 1.0, "four": 0.5}, handles):
        model, handle = tuned_handle(front, module)
        handles.append(handle)
        if not is_tuned:
            handle._tuning.close()
        broken = is_tuned and dist.get_rank() == where
        with mock.patch.object(runtime, part, PARTS[part] if broken else getattr(runtime, part)):
            digests, policies = [], []
            for step in range(STEPS):
                digests += train(
                    model, module, range(step, step + 1), lambda _: digest_of(p.grad for p in module.parameters())
                )
                policies.append(policy_of(handle))
    decisions = [(each.level, each.text) for each in handle.decisions]
    hooked = front == "ddp" and comm_hook(model) is not None
    groups = len(dist.distributed_c10d._world.pg_map)
    handle.close()
    return digests, {*policies}, decisions, hooked, groups


def with_and_without(front: str, part: str, where: int) -> Any:
    return trained(front, part, where, True), trained(front, part, where, False)


@pytest.mark.parametrize(
    ("front", "part", "where"),
    [
        ("ddp", "build_message", 1),
        ("module", "build_message", 0),
        ("ddp", "DeviceLanes", 1),
        pytest.param("module", "compile_host", 1, marks=pytest.mark.slow),
        pytest.param("ddp", "compile_host", 0, marks=pytest.mark.slow),
    ],
)
def test_a_plan_that_one_rank_cannot_build_leaves_plain_averaging_on_all(front, part, where):
    for found, expected in values_of(run_ranks(2, with_and_without, front, part, where)):
        digests, policies, ((level, text),), hooked, groups = found
        assert digests == expected[0] and policies == {PLAIN}
        assert level == logging.WARNING and f"MemoryError: no room (rank {where})" in text
        assert "training goes on with plain averaging; next attempt in 1,000 steps" in text
        assert not hooked and groups == expected[-1]


def without_room_for_four(spec: MessageSpec, *more: Any, **named: Any) -> Any:
    """A message, unless it has units of 4 bits on rank 1."""
    has_four = any(unit.plan.compressor == BlockQuant(bits=4) for unit in spec.units)
    return (without_room if has_four and dist.get_rank() else build_message)(spec, *more, **named)


def by_rank(method: BlockQuant, device: torch.device) -> str:
    """Ranks compute with 4 bits in different ways, as they do with PowerSGD on GPUs of two kinds."""
    return f"kind {dist.get_rank()}" if method.bits == 4 else ""


TROUBLES: dict[str, tuple[Any, str, Any, str]] = {
    # the owner, the name and the replacement of a function, and a part of the warning
    "room": (runtime, "build_message", without_room_for_four, "no room (rank 1)"),
    "arithmetic": (BlockQuant, "arithmetic", by_rank, "kind 1"),
}


def one_of_two(front: str, trouble: str) -> Any:
    """The plans of a training in which ranks cannot run the fastest one together, and its decisions."""
    module, handles = build("Mlp"), []
    with scripted(module, SPECS | {"eight": "BlockQuant"}, {PLAIN: 1.0, "four": 0.5, "eight": 0.7}, handles):
        model, handle = tuned_handle(front, module)
        handles.append(handle)
        with mock.patch.object(*TROUBLES[trouble][:3]):
            policies = train(model, module, range(rules.STEPS + 2), lambda _: policy_of(handle))
    decisions = [(each.level, each.text) for each in handle.decisions]
    handle.close()
    return policies, decisions


@pytest.mark.parametrize(
    ("front", "trouble"),
    [
        ("ddp", "room"),
        ("module", "arithmetic"),
        pytest.param("module", "room", marks=pytest.mark.slow),
        pytest.param("ddp", "arithmetic", marks=pytest.mark.slow),
    ],
)
def test_other_plans_are_tried_without_the_one_that_cannot_be_built(front, trouble):
    first, second = values_of(run_ranks(2, one_of_two, front, trouble))
    assert first == second
    policies, ((level, text), (_, chosen)) = first
    assert {*policies} == {PLAIN, "eight"} and policies[-1] == "eight"
    assert level == logging.WARNING and "BlockQuant(bits=4)" in text and TROUBLES[trouble][3] in text
    assert "training goes on with other plans" in text and "chosen" in chosen and "(four)" not in chosen
