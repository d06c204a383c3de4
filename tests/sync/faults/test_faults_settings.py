"""When ranks have different settings, all raise the same error before anything is created; then they can agree."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gckernels
from ddp_models import attached
from gckernels import BlockQuant, EFSignSGD, PowerSGD, sync
from gckernels.sync import Plan
from models import build
from ranks import run_ranks, values_of
from workloads import digest_of

OTHER = 1
FRONTS = ("attach", "module")


def _taken(front: str, module: nn.Module, what: Any, **settings: Any) -> tuple[Any, Any]:
    """The model to train, and the attachment."""
    # DDP itself compares the models and raises, unless it is told not to
    return attached(front, module, what, {"init_sync": False}, **settings)


def _plan(module: nn.Module) -> Plan:
    return sync.uniform_plan(module.named_parameters(), BlockQuant(), world_size=dist.get_world_size())


def _another_version(front: str, other: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if other:
            patch.setattr(gckernels, "__version__", "0.0.9")
        _taken(front, build("Mlp"), BlockQuant())


def _a_parameter_more(front: str, other: bool) -> None:
    module = build("Mlp")
    if other:
        module.layers.append(nn.Linear(7, 7, bias=False))
    _taken(front, module, BlockQuant())


def _another_size(front: str, other: bool) -> None:
    module = build("Mlp")
    if other:
        module.layers[2] = nn.Linear(67, 41, bias=False)
        module.layers[2].bias = nn.Parameter(torch.zeros(1))
    _taken(front, module, BlockQuant())


def _another_plan(front: str, other: bool) -> None:
    module = build("Mlp")
    plan = _plan(module)
    if other:
        first, second, third, *units = plan.units
        plan = Plan((first, second, dataclasses.replace(third, compressor=BlockQuant(bits=4)), *units))
    _taken(front, module, plan)


def _another_root(front: str, other: bool) -> None:
    module = build("Mlp")
    plan = _plan(module)
    if other:
        plan = Plan((*plan.units[:-1], dataclasses.replace(plan.units[-1], root=1)))
    _taken(front, module, plan)


def _more_channels(front: str, other: bool) -> None:
    module = build("Mlp")
    _taken(front, module, dataclasses.replace(_plan(module), channels=2 if other else 1))


def _another_machine(front: str, other: bool) -> None:
    """Ranks multiply matrices in different ways, because their GPUs are of two kinds, or one has no compiler."""
    arithmetic = f"PowerSGD by kind {int(other)}"
    with mock.patch.object(PowerSGD, "arithmetic", lambda method, device: arithmetic):
        _taken(front, build("Mlp"), PowerSGD())


def _with(**settings: Any) -> Callable[[str, bool], None]:
    return lambda front, other: _taken(front, build("Mlp"), BlockQuant(), **{k: v[other] for k, v in settings.items()})


CASES: dict[str, tuple[Callable[[str, bool], object], tuple[str, ...], tuple[str, ...]]] = {
    # a rank's setting; parts of the error text about the other ranks, and about this rank
    "version": (_another_version, (f"gckernels {gckernels.__version__}",), ("gckernels 0.0.9",)),
    "seed": (_with(seed=(0, 1)), ("seed 0",), ("seed 1",)),
    "start_step": (_with(start_step=(0, 7)), ("start_step 0",), ("start_step 7",)),
    "a parameter more": (_a_parameter_more, ("nothing",), ('"parameter":"layers.5.weight"',)),
    "another size": (
        _another_size,
        ('"numel":41,"parameter":"layers.2.bias"',),
        ('"numel":1,"parameter":"layers.2.bias"',),
    ),
    "plan": (
        _another_plan,
        ("plan ", '"bits":8', '"parameter":"layers.2.weight"'),
        ("plan ", '"bits":4', '"parameter":"layers.2.weight"'),
    ),
    "machine": (_another_machine, ("PowerSGD by kind 0",), ("PowerSGD by kind 1",)),
    "root": (_another_root, ('"parameter":"layers.4.bias"', '"root":0'), ('"parameter":"layers.4.bias"', '"root":1')),
    "channels": (_more_channels, ('"channels":1',), ('"channels":2',)),
}
OF_THE_MODULE = {
    "bucket_cap_mb": (_with(bucket_cap_mb=(1.0, 2.0)), ("bucket_cap_mb 1.0",), ("bucket_cap_mb 2.0",)),
    "find_unused_parameters": (
        _with(find_unused_parameters=(False, True)),
        ("find_unused_parameters False",),
        ("find_unused_parameters True",),
    ),
}


def _cases(front: str) -> dict[str, Any]:
    return CASES | (OF_THE_MODULE if front == "module" else {})


def disagreed(front: str) -> tuple[dict[str, str], str]:
    """Make every case's attempt, and return the texts of the errors and the digest of a training afterwards."""
    rank = dist.get_rank()
    errors = {}
    for name, (take, *_) in _cases(front).items():
        groups, threads = len(dist.distributed_c10d._world.pg_map), threading.active_count()
        with pytest.raises(RuntimeError) as caught:
            take(front, rank == OTHER)
        errors[name] = str(caught.value)
        assert len(dist.distributed_c10d._world.pg_map) == groups, "no process group has been made"
        assert threading.active_count() == threads, "and no lane"
    module = build("Mlp")
    model, taken = _taken(front, module, EFSignSGD())
    digests = []
    for step in range(3):
        model(module.batch(step, rank)).backward()
        digests.append(digest_of(parameter.grad for parameter in module.parameters()))
    taken.close()
    return errors, str(digests)


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_raise_the_same_and_can_agree_afterwards(world_size, front):
    found = values_of(run_ranks(world_size, disagreed, front, group_timeout_s=20))
    assert len({digests for _, digests in found}) == 1
    for name, (_, said_by_most, said_by_one) in _cases(front).items():
        (text,) = {errors[name] for errors, _ in found}  # all ranks have the same text
        assert text.startswith("attach: the ranks do not have the same settings:\n  rank 0: "), text
        lines = text.splitlines()
        for rank in range(world_size):
            shown = " ".join(line for line in lines if line.startswith(f"  rank {rank}: "))
            for output in said_by_one if rank == OTHER else said_by_most:
                assert output in shown, (name, rank, text)


def left_alone(front: str) -> list[bool]:
    """For every parameter, whether it is unchanged and trainable after a refusal because of another version."""
    module = build("Mlp", seed=dist.get_rank())
    before = [parameter.detach().clone() for parameter in module.parameters()]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="same settings"):
        if dist.get_rank() == OTHER:
            patch.setattr(gckernels, "__version__", "0.0.9")
        _taken(front, module, BlockQuant())
    module(module.batch(0, dist.get_rank())).backward()  # no hook remains on the module
    parameters = list(module.parameters())
    return [torch.equal(p, was) and p.grad is not None for p, was in zip(parameters, before, strict=True)]


@pytest.mark.parametrize("front", FRONTS)
def test_a_refused_model_is_left_alone(front):
    for untouched in values_of(run_ranks(2, left_alone, front, group_timeout_s=20)):
        assert all(untouched)
