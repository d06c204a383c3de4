"""A bare module has the same gradients as a DDP model with the same plan, for every model and kind of
training."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import gckernels
from gckernels import BlockQuant, EFSignSGD, Identity, sync
from gckernels.sync import Plan, PlanError, UnitPlan, attach
from gckernels.sync.programs import ALLREDUCE, ALLTOALL, PROGRAMS
from models import Branches, Mlp, build
from ranks import run_ranks, values_of
from workloads import combinations, digest_of, topology

SMALL = 0.005  # MiB, for several buckets
STEPS = 5
SGD = {"lr": 0.05, "momentum": 0.5}


def digest(module: nn.Module) -> str:
    return digest_of(parameter.grad for parameter in module.parameters())


# -------------------------------------------------------------------- comparison with the hook


def like_the_hook(settings: list[tuple[str, str, str]]) -> list[list[tuple[str, str]]]:
    """For every compressor, program and model: the digests of each step's gradients under the hook and under the
    attachment."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    found = []
    for compressor, program, model in settings:
        module = build(model)
        other = copy.deepcopy(module)
        unused = model == "Branches"
        hooked = DistributedDataParallel(module, bucket_cap_mb=SMALL, find_unused_parameters=unused)
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        plan = sync.uniform_plan(
            parameters.items(),
            gckernels.from_spec(compressor),
            program=PROGRAMS[program],
            topology=topology(world_size),
            world_size=world_size,
        )
        of_ddp = attach(hooked, plan, start_step=1)
        of_module = attach(other, plan, bucket_cap_mb=SMALL, find_unused_parameters=unused)
        optimizers = [torch.optim.SGD(each.parameters(), **SGD) for each in (module, other)]
        digests = []
        for step in range(STEPS):
            batch = module.batch(step, rank)
            hooked(batch).backward()
            other(batch).backward()
            digests.append((digest(module), digest(other)))
            for optimizer in optimizers:
                if step:  # with more than two ranks the first step, a plain reduction, may differ in the last bit
                    optimizer.step()
                optimizer.zero_grad(set_to_none=step % 2 == 0)
        assert of_ddp.residual_nbytes() == of_module.residual_nbytes()
        of_ddp.close()
        of_module.close()
        found.append(digests)
    return found


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("world_size", "model", "every"),
    [
        pytest.param(2, "Zoo", 8, marks=SLOW),
        pytest.param(2, "Branches", 9, marks=SLOW),
        (3, "Mlp", 14),
        *(pytest.param(2, model, 1, marks=SLOW) for model in ("Mlp", "Zoo", "Branches")),
        *(pytest.param(3, model, 3, marks=SLOW) for model in ("Mlp", "Zoo", "Branches")),
    ],
)
def test_the_gradients_of_the_hook(world_size, model, every):
    """The gradients are equal bit for bit. With more than two ranks the first step is excepted: its order of addition
    depends on the place in a buffer."""
    pairs = combinations() if world_size == 2 else combinations("allgather", "alltoall", "parameter_server")
    settings = [(*pair, model) for pair in pairs[::every]]
    for found in zip(settings, *values_of(run_ranks(world_size, like_the_hook, settings)), strict=True):
        setting, *ranks = found
        for digests in ranks:
            for step, (hooks, ours) in enumerate(digests):
                assert digests == ranks[0], setting
                assert hooks == ours or (world_size > 2 and step == 0), (setting, step)


# -------------------------------------------------------------------- kinds of training


class Checkpointed(Mlp):
    """A model that recomputes its middle layers in a nested backward."""

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        first, *middle, last = self.layers
        hidden = first(batch["x"])
        hidden = checkpoint(nn.Sequential(*middle), hidden, use_reentrant=True)
        return F.cross_entropy(last(hidden), batch["y"])


def checkpointed() -> list[tuple[str, str]]:
    torch.manual_seed(0)
    module = Checkpointed()
    plain = copy.deepcopy(module)
    attachment = attach(module, EFSignSGD(), bucket_cap_mb=SMALL)
    plain.forward = lambda batch: Mlp.forward(plain, batch)
    other = attach(plain, EFSignSGD(), bucket_cap_mb=SMALL)
    found = []
    for step in range(STEPS):
        for model in (module, plain):
            model.zero_grad()
            model(Mlp.batch(step, dist.get_rank())).backward()
        found.append((digest(module), digest(plain)))
    attachment.close()
    other.close()
    return found


def test_activation_checkpointing():
    for found in values_of(run_ranks(2, checkpointed)):
        assert all(ours == plain for ours, plain in found)


def trained(change: str) -> tuple[str, str]:
    """Train with a special feature, and again with exact means of the ranks' gradients; return the digests of both."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(change, torch.float32)
    module = build("Mlp", dtype, seed=rank)  # rank 0's parameters replace the others'
    reference = build("Mlp", dtype)
    attachment = attach(module, Identity(), bucket_cap_mb=SMALL)
    assert digest_of(module.parameters()) == digest_of(reference.parameters())
    model = torch.compile(module, backend="eager") if change == "compile" else module
    optimizers = [[torch.optim.SGD(each.parameters(), **SGD)] for each in (module, reference)]
    if change == "optimizers":
        optimizers = [
            [torch.optim.SGD(each.layers[:2].parameters(), **SGD), torch.optim.Adam(each.layers[2:].parameters())]
            for each in (module, reference)
        ]
    digests: tuple[list[str], list[str]] = ([], [])
    has_graph = change == "graph"
    for step in range(STEPS):
        batches = [Mlp.batch(step + 100 * micro, rank, dtype) for micro in range(3 if change == "accumulate" else 1)]
        if change == "freeze":
            for each in (module, reference):
                each.layers[2].requires_grad_(step % 2 == 0)
        for batch in batches:
            warns = pytest.warns(UserWarning, match="no graph") if has_graph else contextlib.nullcontext()
            with contextlib.nullcontext() if batch is batches[-1] else attachment.no_sync(), warns:
                model(batch).backward(create_graph=has_graph)
            reference(batch).backward()
        for parameter in reference.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad.mul_(1 / world_size))
        for each, optimizer, found in zip((module, reference), optimizers, digests, strict=True):
            if change == "clip":
                torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1)
            found.append(digest(each))
            for one in optimizer:
                one.step()
                one.zero_grad()
    attachment.close()
    return tuple(
        digest_of(each.parameters()) + "".join(d) for each, d in zip((module, reference), digests, strict=True)
    )


@pytest.mark.parametrize(
    "change",
    ["", "bf16", "fp16", "accumulate", "freeze", "clip", "optimizers", "compile", "graph"],
    ids=lambda c: c or "plain",
)
def test_identity_is_the_mean(change):
    for ours, expected in values_of(run_ranks(2, trained, change)):
        assert ours == expected


# -------------------------------------------------------------------- units other than parameters


def merged_and_parted(kind: str) -> tuple[list[str], int]:
    """Digests of the gradients of a plan whose units are not the parameters, and the number of residuals."""
    rank = dist.get_rank()
    module = build("Mlp")
    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    plan = sync.uniform_plan(
        module.named_parameters(), BlockQuant(), program=ALLTOALL, world_size=dist.get_world_size()
    )
    if kind == "merged":
        first, *others = sizes
        unit = UnitPlan(first, sum(sizes.values()), BlockQuant(), ALLTOALL, True, also=tuple(others))
        plan = Plan((unit,))
    elif kind in ("parted", "partly reduced"):
        units = []
        for unit in plan.units:
            for start in range(0, unit.numel, 1000):
                numel = min(1000, unit.numel - start)
                units.append(dataclasses.replace(unit, start=start, numel=numel))
        if kind == "partly reduced":
            encoded = [index for index, unit in enumerate(units) if unit.feedback]
            for index in encoded[::2]:
                units[index] = dataclasses.replace(
                    units[index], compressor=Identity(), program=ALLREDUCE, feedback=False
                )
        plan = Plan(tuple(units), channels=2)
    attachment = attach(module, plan, bucket_cap_mb=SMALL)
    digests, worst = [], 0.0
    for step in range(STEPS):
        module.zero_grad()
        alone = copy.deepcopy(module)
        for parameter in alone.parameters():
            parameter.grad = None
        batch = Mlp.batch(step, rank)
        module(batch).backward()
        alone(batch).backward()
        digests.append(digest(module))
        for mine, ours in zip(alone.parameters(), module.parameters(), strict=True):
            dist.all_reduce(mine.grad.mul_(1 / dist.get_world_size()))
            worst = max(worst, (mine.grad - ours.grad).abs().max().item() / max(1e-3, mine.grad.abs().max().item()))
    assert 0 < worst < 0.2  # the gradients are compressed, with a small error
    names = sorted(attachment.state_dict()["feedback"]["worker"])
    attachment.close()
    return digests, len(names)


@pytest.mark.parametrize(("kind", "residuals"), [("merged", 1), ("parted", 2 + 3 + 1), ("partly reduced", 3)])
def test_units_that_are_not_parameters(kind, residuals):
    found = values_of(run_ranks(2, merged_and_parted, kind))
    assert found[0] == found[1]
    assert found[0][1] == residuals


# -------------------------------------------------------------------- refused arguments


def _stepping_in_backward(module: nn.Module) -> nn.Module:
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    return module


def refused() -> list[str]:
    module = build("Mlp")
    plan = sync.uniform_plan(module.named_parameters(), BlockQuant(), world_size=dist.get_world_size())
    on_rank_1 = dist.get_rank() == 1
    attempts: list[tuple[Any, Any, dict[str, Any]]] = [
        ("model", BlockQuant(), {}),
        (torch.compile(DistributedDataParallel(build("Mlp"))), BlockQuant(), {}),
        (nn.ReLU(), BlockQuant(), {}),
        (_stepping_in_backward(build("Mlp")), BlockQuant(), {}),
        (module, BlockQuant, {}),
        (module, 8, {}),
        (module, BlockQuant(), {"bucket_cap_mb": 0}),
        (module, BlockQuant(), {"seed": 1.5}),
        (module, BlockQuant(), {"start_step": -1}),
        (module, Plan(plan.units[1:]), {}),
        (module, BlockQuant(bits=4 if on_rank_1 else 8), {}),
        (module, BlockQuant(), {"seed": dist.get_rank()}),
        (module, BlockQuant(), {"bucket_cap_mb": -1 if on_rank_1 else 25}),
    ]
    texts = []
    for model, what, arguments in attempts:
        try:
            attach(model, what, **arguments).close()
            texts.append("nothing")
        except (TypeError, ValueError, RuntimeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    attachment = attach(module, plan)
    module(Mlp.batch(0, dist.get_rank())).backward()
    texts.append(digest(module))
    attachment.close()
    return texts


def test_what_is_refused():
    found = values_of(run_ranks(2, refused, group_timeout_s=20))
    for rank, texts in enumerate(found):
        for text, expected in zip(
            texts,
            [
                "TypeError: attach: model must be a torch.nn.Module, got str",
                "TypeError: attach: model is compiled; attach to the DistributedDataParallel model",
                "ValueError: attach: model has no parameters",
                "ValueError: attach: parameter layers.0.weight has an optimizer that steps in backward",
                "TypeError: attach: how must be a Plan, an Auto, Updates, a compressor such as gckernels.EFSignSGD()",
                "TypeError: attach: how must be a Plan, an Auto, Updates, a compressor such as gckernels.EFSignSGD()",
                "ValueError: attach: bucket_cap_mb must be None or a number above 0, got 0",
                "TypeError: attach: seed must be an int, got float",
                "ValueError: attach: start_step must be an int from 0 up, got -1",
                "PlanError: plan does not fit the model:\n  layers.0.weight: not in the plan",
                "Disagreement: attach: the ranks do not have the same settings",
                "Disagreement: attach: the ranks do not have the same settings",
                "ValueError: " if rank == 1 else "RuntimeError: attach: failed on rank 1",
                found[0][-1],
            ],
            strict=True,
        ):
            assert text.startswith(expected)


def unused(find: bool) -> list[str]:
    """Train two steps of a model that leaves a layer unused; return the result of the second, a gradient or an
    error."""
    module = build("Branches")
    attachment = attach(module, BlockQuant(), find_unused_parameters=find)
    texts = []
    for step in range(2):
        try:
            module(Branches.batch(step, dist.get_rank())).backward()
            texts.append(str(module.never.weight.grad))
        except RuntimeError as error:
            texts.append(str(error))
    attachment.close()
    return texts


def test_unused_parameters_have_to_be_announced():
    for _, second in values_of(run_ranks(2, unused, False)):
        assert "came twice in a step in which none came for never.bias, never.weight" in second
    assert values_of(run_ranks(2, unused, True)) == [["None", "None"]] * 2


def reads() -> list[int]:
    """The number of tensors that the host reads in each step of a model whose branches a rank uses in part."""
    module = build("Branches")
    module.never.requires_grad_(False)
    attachment = attach(module, BlockQuant(), find_unused_parameters=True)
    read, counts = torch.Tensor.tolist, []
    for step in range(5):
        counts.append(0)

        def counted(tensor: torch.Tensor) -> Any:
            counts[-1] += 1
            return read(tensor)

        with mock.patch.object(torch.Tensor, "tolist", counted):
            module(Branches.batch(step, dist.get_rank())).backward()
    attachment.close()
    return counts


def test_the_host_reads_from_a_device_only_where_a_rank_has_not_used_everything():
    assert values_of(run_ranks(2, reads)) == [[0, 1, 1, 1, 1], [0, 0, 1, 1, 1]]


def test_merged_units_are_not_for_the_hook():
    found = values_of(run_ranks(2, merged_with_the_hook))
    assert all("plan merges parameters" in text and "weight+layers.0.bias" in text for text in found)


def merged_with_the_hook() -> str:
    module = build("Mlp")
    units = {
        unit.parameter: unit for unit in sync.uniform_plan(module.named_parameters(), BlockQuant(), world_size=2).units
    }
    weight, bias = units.pop("layers.0.weight"), units.pop("layers.0.bias")
    merged = dataclasses.replace(weight, numel=weight.numel + bias.numel, also=(bias.parameter,))
    with pytest.raises(PlanError) as caught:
        attach(DistributedDataParallel(module), Plan((merged, *units.values())))
    return str(caught.value)
