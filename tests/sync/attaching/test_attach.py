"""``attach`` refuses wrong use: every rank raises, none hangs, and the group works afterwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

from gckernels import BlockQuant, EFSignSGD, sync
from gckernels.sync import Plan, PlanError, attach, exempt_vectors
from gckernels.sync.programs import ALLGATHER, ENCODED_ALLREDUCE, Program
from leftovers import lanes
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from workloads import digest_of

Attempt = Callable[[DistributedDataParallel, int], Any]


def _wrapped(module: nn.Module | None = None) -> DistributedDataParallel:
    return DistributedDataParallel(module or build("Mlp"), bucket_cap_mb=SMALL_BUCKETS)


def _with_hook(model: DistributedDataParallel) -> DistributedDataParallel:
    model.register_comm_hook(None, allreduce_hook)
    return model


def _with_builtin_hook(model: DistributedDataParallel) -> DistributedDataParallel:
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    return model


def _stepping_in_backward(model: DistributedDataParallel) -> DistributedDataParallel:
    _apply_optimizer_in_backward(torch.optim.SGD, model.module.parameters(), {"lr": 0.1})
    return model


def _frozen(model: DistributedDataParallel) -> DistributedDataParallel:
    model.module.layers[0].bias.requires_grad_(False)
    return model


def _plan(model: DistributedDataParallel, **settings: Any) -> Plan:
    return sync.uniform_plan(model, BlockQuant(), **settings)


def _through(program: Program, plan: Plan) -> Plan:
    return dataclasses.replace(plan, units=tuple(dataclasses.replace(unit, program=program) for unit in plan.units))


def _changed(plan: Plan) -> Plan:
    first, second, *others = plan.units
    return dataclasses.replace(plan, units=(first, dataclasses.replace(second, compressor=BlockQuant(bits=4)), *others))


def _smaller(plan: Plan) -> Plan:
    return Plan((*plan.units[1:], dataclasses.replace(plan.units[0], parameter="elsewhere")))


def _second(model: DistributedDataParallel) -> None:
    first = attach(model, BlockQuant())
    try:
        attach(model, BlockQuant())
    finally:
        first.close()


ATTEMPTS: dict[str, tuple[Attempt, str, str]] = {
    # the ranks' action; the errors that rank 1 and the other ranks raise, each as a type and a part of the text
    "twice": (
        lambda model, rank: _second(model),
        "ValueError: attach: model has a gckernels attachment already",
        "ValueError: attach: model has a gckernels attachment already",
    ),
    "no model": (
        lambda model, rank: attach("model", BlockQuant()),
        "TypeError: attach: model must be a torch.nn.Module, got str",
        "TypeError: attach: model must be a torch.nn.Module, got str",
    ),
    "a bare module on one rank": (
        lambda model, rank: attach(build("Mlp") if rank == 1 else model, BlockQuant()),
        "Disagreement: attach: the ranks do not have the same settings",
        "Disagreement: attach: the ranks do not have the same settings",
    ),
    "the module in the model": (
        lambda model, rank: attach(model.module, BlockQuant()),
        "ValueError: attach: parameter layers.0.weight is averaged by a DistributedDataParallel model, too",
        "ValueError: attach: parameter layers.0.weight is averaged by a DistributedDataParallel model, too",
    ),
    "an option of bare modules": (
        lambda model, rank: attach(model, BlockQuant(), bucket_cap_mb=10),
        "ValueError: attach: bucket_cap_mb is only for bare modules; DDP and FSDP2 have their own setting; ",
        "ValueError: attach: bucket_cap_mb is only for bare modules; DDP and FSDP2 have their own setting; ",
    ),
    "another option of bare modules on one rank": (
        lambda model, rank: attach(model, BlockQuant(), find_unused_parameters=rank == 1),
        "ValueError: attach: find_unused_parameters is only for bare modules; DDP and FSDP2 have their own setting; ",
        "RuntimeError: attach: failed on rank 1: attach: find_unused_parameters is only for bare modules",
    ),
    "no model at all on one rank": (
        lambda model, rank: attach(None if rank == 1 else model, BlockQuant()),
        "TypeError: attach: model must be a torch.nn.Module, got NoneType",
        "RuntimeError: attach: failed on rank 1",
    ),
    "another hook": (
        lambda model, rank: attach(_with_hook(model), BlockQuant()),
        "ValueError: attach: model has a communication hook already",
        "ValueError: attach: model has a communication hook already",
    ),
    "another hook on one rank": (
        lambda model, rank: attach(_with_hook(model) if rank == 1 else model, BlockQuant()),
        "ValueError: attach: model has a communication hook already",
        "RuntimeError: attach: failed on rank 1: attach: model has a communication hook already",
    ),
    "a built-in hook on one rank": (
        lambda model, rank: attach(_with_builtin_hook(model) if rank == 1 else model, BlockQuant()),
        "ValueError: attach: model has a communication hook already",
        "RuntimeError: attach: failed on rank 1: attach: model has a communication hook already",
    ),
    "different compressors": (
        lambda model, rank: attach(model, BlockQuant(bits=4 if rank == 1 else 8)),
        "Disagreement: attach: the ranks do not have the same settings:\n  rank 0: BlockQuant(bits=8",
        "Disagreement: attach: the ranks do not have the same settings:\n  rank 0: BlockQuant(bits=8",
    ),
    "different seeds": (
        lambda model, rank: attach(model, BlockQuant(), seed=rank),
        "Disagreement: attach: the ranks do not have the same settings",
        "Disagreement: attach: the ranks do not have the same settings",
    ),
    "different programs": (
        lambda model, rank: attach(model, _plan(model, program="alltoall" if rank == 1 else "allgather")),
        '"step":"AllToAll"',
        '"step":"AllToAll"',
    ),
    "different exemptions": (
        lambda model, rank: attach(model, _plan(model, exempt=None if rank == 1 else exempt_vectors)),
        "Disagreement: attach: the ranks do not have the same settings",
        "Disagreement: attach: the ranks do not have the same settings",
    ),
    "a plan and a compressor": (
        lambda model, rank: attach(model, _plan(model) if rank == 1 else BlockQuant()),
        "Disagreement: attach: the ranks do not have the same settings",
        "Disagreement: attach: the ranks do not have the same settings",
    ),
    "a program that does not fit": (
        lambda model, rank: attach(model, _through(ENCODED_ALLREDUCE, _plan(model))),
        "PlanError: plan does not fit the model:\n  layers.0.weight: program Encode AllReduce Decode: step 1",
        "PlanError: plan does not fit the model:\n  layers.0.weight: program Encode AllReduce Decode: step 1",
    ),
    "a program that does not fit on one rank": (
        lambda model, rank: attach(model, _through(ENCODED_ALLREDUCE if rank == 1 else ALLGATHER, _plan(model))),
        "PlanError: plan does not fit the model:\n  layers.0.weight: program Encode AllReduce Decode: step 1",
        "RuntimeError: attach: failed on rank 1: plan does not fit the model",
    ),
    "a topology of other ranks": (
        lambda model, rank: attach(model, _plan(model, topology=(4, 2))),
        "PlanError: plan is for Topology(machines=4, devices=2), here are ",
        "PlanError: plan is for Topology(machines=4, devices=2), here are ",
    ),
    "a plan of another model": (
        lambda model, rank: attach(model, _smaller(_plan(model))),
        "PlanError: plan does not fit the model:\n  layers.0.weight: not in the plan\n  elsewhere: not a parameter",
        "PlanError: plan does not fit the model:\n  layers.0.weight: not in the plan\n  elsewhere: not a parameter",
    ),
    "a plan of another model on one rank": (
        lambda model, rank: attach(model, _smaller(_plan(model)) if rank == 1 else _plan(model)),
        "PlanError: plan does not fit the model",
        "RuntimeError: attach: failed on rank 1: plan does not fit the model",
    ),
    "another plan on one rank": (
        lambda model, rank: attach(model, _plan(model) if rank != 1 else _changed(_plan(model))),
        '{"also":[],"channel":null,"compressor":{"bits":4',
        '\nfirst difference:\n  rank 0: {"also":[],"channel":null,"compressor":{"name":"Identity"',
    ),
    "parameters frozen since": (
        lambda model, rank: attach(_frozen(model), BlockQuant()),
        "ValueError: attach: model averages 6 parameters since it was made, and 5 need gradients now",
        "ValueError: attach: model averages 6 parameters since it was made, and 5 need gradients now",
    ),
    "sparse gradients": (
        lambda model, rank: attach(_wrapped(nn.Sequential(nn.Embedding(5, 3, sparse=True))), BlockQuant()),
        "ValueError: attach: parameter 0.weight has a sparse gradient",
        "ValueError: attach: parameter 0.weight has a sparse gradient",
    ),
    "no compressor on one rank": (
        lambda model, rank: attach(model, sync.Auto() if rank == 1 else BlockQuant()),
        "Disagreement: attach: the ranks do not have the same settings",
        "Disagreement: attach: the ranks do not have the same settings",
    ),
    "nothing in place of a compressor on one rank": (
        lambda model, rank: attach(model, None if rank == 1 else BlockQuant()),  # type: ignore[arg-type]
        "TypeError: attach: how must be a Plan, an Auto, Updates, a compressor such as gckernels.EFSignSGD(),",
        "RuntimeError: attach: failed on rank 1: attach: how must be a Plan, an Auto, Updates, a compressor",
    ),
    "a number on one rank": (
        lambda model, rank: attach(model, 8 if rank == 1 else BlockQuant()),  # type: ignore[arg-type]
        "TypeError: attach: how must be a Plan, an Auto, Updates, a compressor such as gckernels.EFSignSGD(),",
        "RuntimeError: attach: failed on rank 1: attach: how must be a Plan, an Auto, Updates, a compressor",
    ),
    "a class": (
        lambda model, rank: attach(model, BlockQuant),  # type: ignore[arg-type]
        "such as 'BlockQuant(bits=4)', got the class BlockQuant; write BlockQuant()",
        "such as 'BlockQuant(bits=4)', got the class BlockQuant; write BlockQuant()",
    ),
    "a spec of no compressor": (
        lambda model, rank: attach(model, "BlockQuant(bits=3)"),
        "ValueError: attach: how cannot be 'BlockQuant(bits=3)': BlockQuant: bits must be one of 8, 4",
        "ValueError: attach: how cannot be 'BlockQuant(bits=3)': BlockQuant: bits must be one of 8, 4",
    ),
    "a compiled model on one rank": (
        lambda model, rank: attach(torch.compile(model) if rank == 1 else model, BlockQuant()),
        "TypeError: attach: model is compiled; attach to the DistributedDataParallel model, then compile that",
        "RuntimeError: attach: failed on rank 1: attach: model is compiled",
    ),
    "an optimizer in backward": (
        lambda model, rank: attach(_stepping_in_backward(model), BlockQuant()),
        "ValueError: attach: parameter layers.0.weight has an optimizer that steps in backward",
        "ValueError: attach: parameter layers.0.weight has an optimizer that steps in backward",
    ),
    "no seed on one rank": (
        lambda model, rank: attach(model, BlockQuant(), seed=None if rank == 1 else 0),
        "TypeError: attach: seed must be an int, got NoneType",
        "RuntimeError: attach: failed on rank 1: attach: seed must be an int",
    ),
    "another start on one rank": (
        lambda model, rank: attach(model, BlockQuant(), start_step=rank),
        "Disagreement: attach: the ranks do not have the same settings",
        "Disagreement: attach: the ranks do not have the same settings",
    ),
    "a start before the first step on one rank": (
        lambda model, rank: attach(model, BlockQuant(), start_step=-1 if rank == 1 else 0),
        "ValueError: attach: start_step must be an int from 0 up, got -1",
        "RuntimeError: attach: failed on rank 1: attach: start_step must be an int",
    ),
    "a text that is too long to exchange": (
        lambda model, rank: attach(model, ("€" * 10_000) if rank == 1 else BlockQuant()),
        "ValueError: attach: how cannot be '€€€",
        "RuntimeError: attach: failed on rank 1: attach: how cannot be '€€€",
    ),
}


def refused() -> dict[str, str]:
    """Make every attempt in turn and return its error, as type and text."""
    rank = dist.get_rank()
    errors = {}
    for name, (attempt, _, _) in ATTEMPTS.items():
        model = _wrapped()
        try:
            attempt(model, rank)
            errors[name] = "nothing was raised"
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
        # the group still works
        ranks = torch.tensor([rank])
        dist.all_reduce(ranks)
        assert ranks.item() == sum(range(dist.get_world_size())), name
    model = _wrapped()
    errors["good"] = _trained(model)
    return errors


def _trained(model: DistributedDataParallel) -> str:
    attachment = attach(model, EFSignSGD())
    for step in range(3):
        model(model.module.batch(step, dist.get_rank())).backward()
    attachment.close()
    return digest_of(parameter.grad for parameter in model.parameters())


@pytest.mark.host_only("collectives of a device do not raise where they are issued")
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_every_rank_raises_and_all_goes_on(world_size):
    found = values_of(run_ranks(world_size, refused, group_timeout_s=20))
    for rank, errors in enumerate(found):
        for name, (_, on_rank_1, elsewhere) in ATTEMPTS.items():
            assert (on_rank_1 if rank == 1 else elsewhere) in errors[name], f"rank {rank}, {name}"
    assert {errors["good"] for errors in found} == {found[0]["good"]}
    assert "rank 1: BlockQuant(bits=4" in found[0]["different compressors"]
    assert "seed 0" in found[0]["different seeds"] and "seed 1" in found[0]["different seeds"]


def after_a_refusal_the_same_model() -> str:
    """A refusal leaves nothing behind: the same model can be attached."""
    model = _wrapped()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="same settings"):
            attach(model, BlockQuant(), seed=dist.get_rank())
    with pytest.raises(PlanError):
        attach(model, _through(ENCODED_ALLREDUCE, _plan(model)))
    return _trained(model)


def test_a_model_that_was_refused_can_be_attached():
    assert len(set(values_of(run_ranks(2, after_a_refusal_the_same_model, group_timeout_s=20)))) == 1


def after_a_refusal_of_ddp() -> str:
    """An attachment that DDP itself refuses leaves neither lanes nor process groups, and the model is free."""
    model, before = _wrapped(), len(dist.distributed_c10d._world.pg_map)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(RuntimeError, match="only be called once"):
        patch.setattr(model, "register_comm_hook", _refuse)
        attach(model, BlockQuant())
    assert not lanes()
    assert len(dist.distributed_c10d._world.pg_map) == before
    return _trained(model)


def _refuse(*_: Any) -> None:
    raise RuntimeError("register_comm_hook can only be called once")


def test_a_hook_that_ddp_refuses_leaves_nothing_behind():
    assert len(set(values_of(run_ranks(2, after_a_refusal_of_ddp, group_timeout_s=20)))) == 1


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="not initialised"):
        attach(nn.Linear(2, 2), BlockQuant())
