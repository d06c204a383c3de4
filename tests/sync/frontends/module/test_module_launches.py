"""An attachment executes the launches of a plan, and the gradients do not depend on how units are launched."""

from __future__ import annotations

import copy
import dataclasses
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gckernels
from gckernels import BlockQuant, EFSignSGD, sync
from gckernels.sync import Plan, attach
from gckernels.sync.engine.runtime import Runtime
from gckernels.sync.programs import PROGRAMS
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from workloads import LAUNCHES, digest_of, launched

STEPS = 4  # the first step is not compressed
SLOW = pytest.mark.slow


def trained(module: nn.Module, plan: Plan, **settings: Any) -> tuple[list[str], dict[str, torch.Tensor]]:
    """The digests of the gradients of each step, and the residuals."""
    attachment = attach(module, plan, **settings)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.5)
    digests = []
    for step in range(STEPS):
        module(module.batch(step, dist.get_rank())).backward()
        digests.append(digest_of(parameter.grad for parameter in module.parameters()))
        if step:  # the order of addition in the first step, a plain reduction, depends on the place in a vector
            optimizer.step()
        optimizer.zero_grad()
    residuals = attachment.state_dict()["feedback"]["worker"]
    attachment.close()
    return digests[1:], residuals


# -------------------------------------------------------------------- the same bits


def in_every_way(model: str, spec: str, program: str, ways: tuple[str, ...]) -> dict[str, Any]:
    """The digests of a plan without launches, and of the same units with several kinds of launches."""
    world_size, find_unused = dist.get_world_size(), model == "Branches"
    module = build(model)
    method, steps = gckernels.from_spec(spec), PROGRAMS[program]
    named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    whole = sync.uniform_plan(named, method, program=steps, world_size=world_size, exempt=None)
    found = {}
    for cut, plan in (("", whole), ("parts of ", whole.parted(1000))):
        for how in ("none", *ways):
            other = plan if how == "none" else launched(plan, how)
            settings = {"bucket_cap_mb": SMALL_BUCKETS} if how == "none" else {}
            digests, residuals = trained(
                copy.deepcopy(module), other, find_unused_parameters=find_unused, seed=3, **settings
            )
            found[cut + how] = digests, digest_of(residuals[key] for key in sorted(residuals))
    return found


@pytest.mark.parametrize(
    ("world_size", "model", "spec", "program", "ways"),
    [
        (2, "Mlp", "EFSignSGD", "allgather", ("backwards", "channels", "messages")),
        pytest.param(2, "Branches", "BlockQuant(bits=4)", "alltoall", ("pairs", "messages"), marks=SLOW),
        pytest.param(2, "Branches", "BlockQuant(bits=4)", "alltoall", LAUNCHES, marks=SLOW),
        pytest.param(2, "Zoo", "Cast16", "encoded_allreduce", LAUNCHES, marks=SLOW),
        pytest.param(4, "Zoo", "TopK(ratio=0.1)", "parameter_server", LAUNCHES, marks=SLOW),
        pytest.param(4, "Branches", "BlockFP8", "alltoall", LAUNCHES, marks=SLOW),
        pytest.param(4, "Mlp", "EFSignSGD", "parameter_server", LAUNCHES, marks=SLOW),
        pytest.param(4, "Mlp", "QSGD", "alltoall", LAUNCHES, marks=SLOW),
        pytest.param(2, "Zoo", "PowerSGD", "powersgd", LAUNCHES[:-1], marks=SLOW),  # low-rank factors have no channels
    ],
)
def test_launches_do_not_change_a_bit(world_size, model, spec, program, ways):
    """Units keep their own statistics, whatever they are launched with."""
    ranks = values_of(run_ranks(world_size, in_every_way, model, spec, program, ways))
    for cut in ("", "parts of "):
        for found in ranks:
            expected = found[f"{cut}none"]
            assert {how: found[cut + how] == expected for how in ways} == dict.fromkeys(ways, True)
            assert expected[0] == ranks[0][f"{cut}none"][0]


# -------------------------------------------------------------------- nothing is lost


def lost(how: str) -> tuple[str, float]:
    """A digest of the sums of all gradients that were sent, and the largest difference between these plus the mean of
    the residuals and the sums of all gradients that were computed."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = build("Mlp")
    alone = copy.deepcopy(module)
    plan = sync.uniform_plan(module, EFSignSGD(), program="allgather", exempt=None).parted(1000)
    attachment = attach(module, launched(plan, how))
    totals = [[torch.zeros(parameter.numel()) for parameter in module.parameters()] for _ in range(2)]
    for step in range(STEPS):
        for each, total in zip((module, alone), totals, strict=True):
            each.zero_grad()
            each(module.batch(step, rank)).backward()
            for found, parameter in zip(total, each.parameters(), strict=True):
                found += parameter.grad.flatten()
    residuals = attachment.state_dict()["feedback"]["worker"]
    attachment.close()
    sent, computed = totals
    worst = 0.0
    for name, here, there in zip(dict(module.named_parameters()), sent, computed, strict=True):
        units = sorted((unit for unit in plan.units if unit.parameter == name), key=lambda unit: unit.start or 0)
        unsent = torch.cat([residuals[unit.key] for unit in units])
        assert unsent.any()
        dist.all_reduce(missing := (there - unsent) / world_size)
        worst = max(worst, (missing - here).abs().max().item() / there.abs().max().item())
    return digest_of(sent), worst


@pytest.mark.parametrize(("world_size", "how"), [(2, "backwards"), pytest.param(4, "messages", marks=SLOW)])
def test_gradients_that_are_not_sent_are_in_the_residuals(world_size, how):
    found = values_of(run_ranks(world_size, lost, how))
    assert {digest for digest, _ in found} == {found[0][0]}
    assert max(worst for _, worst in found) < 1e-5  # the rounding of a few additions in fp32


# -------------------------------------------------------------------- the order of launches


def orders(model: str) -> tuple[list[list[tuple[str, ...]]], list[tuple[str, ...]]]:
    """The units of every bucket in the order of submission, for each step, and in the order of the plan. Every rank is
    late with other gradients."""
    rank, module = dist.get_rank(), build(model)
    for index, parameter in enumerate(module.parameters()):
        if index % dist.get_world_size() == rank:
            parameter.register_hook(lambda grad: time.sleep(0.02))
    plan = launched(sync.uniform_plan(module, BlockQuant(), exempt=None), "pairs")
    shuffled = {number: (7 * number) % 110 for number in {unit.launch for unit in plan.units}}
    plan = plan.with_units(dataclasses.replace(unit, launch=shuffled[unit.launch]) for unit in plan.units)
    expected: dict[int, tuple[str, ...]] = {}
    for unit in sorted(plan.units, key=lambda unit: unit.launch):
        expected[unit.launch] = (unit.key, *expected.get(unit.launch, ()))
    steps: list[list[tuple[str, ...]]] = []
    begin_step, submit = Runtime.begin_step, Runtime.submit

    def begun(self: Runtime) -> None:
        steps.append([])
        begin_step(self)

    def noted(self: Runtime, messages: Iterable[Any], *arguments: Any) -> Any:
        steps[-1].append(tuple(key for message in messages for key in message.keys))
        return submit(self, messages, *arguments)

    attachment = attach(module, plan, find_unused_parameters=model == "Branches")
    with mock.patch.object(Runtime, "begin_step", begun), mock.patch.object(Runtime, "submit", noted):
        for step in range(STEPS):
            module.zero_grad()
            module(module.batch(step, rank)).backward()
    attachment.close()
    return steps, list(expected.values())


@pytest.mark.parametrize(
    ("world_size", "model"),
    [(2, "Branches"), pytest.param(4, "Mlp", marks=SLOW), pytest.param(4, "Branches", marks=SLOW)],
)
def test_launches_have_their_order_whichever_gradients_are_late(world_size, model):
    for steps, expected in values_of(run_ranks(world_size, orders, model)):
        assert len(expected) > 2
        assert steps == [expected] * STEPS


def traced(path: str) -> None:
    module = build("Mlp")
    plan = launched(sync.uniform_plan(module, BlockQuant(), exempt=None), "messages")
    units = tuple(dataclasses.replace(unit, channel=unit.message % 3) for unit in plan.units)
    attachment = attach(module, dataclasses.replace(plan, units=units))
    module(module.batch(0, dist.get_rank())).backward()
    with sync.record_timeline(path):
        module.zero_grad()
        module(module.batch(1, dist.get_rank())).backward()
    attachment.close()


def test_a_trace_shows_the_messages_and_channels_of_the_plan(tmp_path):
    path: Path = tmp_path / "trace.json"
    values_of(run_ranks(2, traced, str(path)))
    names = [name for name, _ in build("Mlp").named_parameters()]
    # six parameters in three launches of two messages each
    expected = [((name,), (2 * 10 * (6 - index // 2) + index % 2) % 3) for index, name in enumerate(names)]
    pairs = [expected[4:][::-1], expected[2:4][::-1], expected[:2][::-1]]
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    for rank in range(2):
        found = {
            event["args"]["message"]: (tuple(event["args"]["units"]), event["args"]["channel"])
            for event in events
            if event["pid"] == rank
        }
        assert [found[number] for number in sorted(found)] == [each for pair in pairs for each in pair]
