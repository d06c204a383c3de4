"""Parameters that FSDP ignores or sends in a dtype that no compressor takes, and errors inside its average."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from gckernels import sync
from gckernels.sync.frontends.sharded.stand_ins import ReplicaGroup
from ranks import run_ranks, values_of
from sharded_models import digest, split

BF16, FP64 = torch.bfloat16, torch.float64


class Partly(nn.Module):
    """Two layers and a parameter for FSDP to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 20), nn.Linear(20, 4)
        self.own = nn.Parameter(torch.ones(20, 20))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(inputs) @ self.own))


def _model(form: str, dtype: torch.dtype = torch.float32, ignores: bool = False, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Partly().to(dtype)
    if ignores:
        options["ignored_params"] = {model.own}
    split(model, (model.first, model), form, **options)
    return model


def _trained(model: Any, spec: Any, **options: Any) -> tuple[str, float, list[str]]:
    """The digest of a training, the bytes that are sent in a compressed step, and what was warned of."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        attachment = None if spec is None else sync.attach(model, spec(model) if callable(spec) else spec, **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=False)  # which takes no DTensors beside others
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        inputs = torch.randn(4, 12, generator=generator).to(next(model.parameters()).dtype)
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sent = 0.0 if attachment is None else attachment.sent_nbytes_per_step()
    if attachment is not None:
        attachment.close()
    return digest(model) if isinstance(model.own, DTensor) else "", sent, [str(each.message) for each in seen]


def ignoring(form: str) -> list[Any]:
    """The plan for a model with an ignored parameter, the warnings of attach, and the bytes that are sent."""
    model = _model(form, ignores=True)
    plan = sync.uniform_plan(model, "BlockQuant")
    attachment = sync.attach(model, plan)
    attachment.change_plan(sync.uniform_plan(model, "EFSignSGD"))
    attachment.close()
    return [[unit.parameter for unit in plan.units], _trained(model, plan)[1:]]


def ignoring_in_all_forms() -> list[list[Any]]:
    return [ignoring(form) for form in ("fsdp", "one shard")]


def test_a_plan_has_what_fsdp_does_not_ignore():
    for forms in values_of(run_ranks(2, ignoring_in_all_forms)):
        for names, (sent, warned) in forms:
            assert names == ["first.weight", "first.bias", "second.weight", "second.bias"]
            assert sent > 0
            assert any("parameter own is in no group of FSDP" in each for each in warned)


DTYPES: dict[str, tuple[torch.dtype, MixedPrecisionPolicy, str]] = {
    "wide": (FP64, MixedPrecisionPolicy(), "the parameters have dtype float64"),
    "reduced in bf16": (FP64, MixedPrecisionPolicy(reduce_dtype=BF16), "the parameters have dtype float64"),
    "computed in bf16": (FP64, MixedPrecisionPolicy(param_dtype=BF16), "the parameters have dtype float64"),
    "reduced in fp64": (torch.float32, MixedPrecisionPolicy(reduce_dtype=FP64), "FSDP reduces gradients in float64"),
}


def in_dtypes(form: str) -> dict[str, list[Any]]:
    """By setting: a training of FSDP alone; with a compressor, with a plan, and with encoded parameters."""
    found = {}
    for name, (dtype, policy, _) in DTYPES.items():
        make = functools.partial(_model, form, dtype, mp_policy=policy)
        found[name] = [_trained(make(), None), _trained(make(), "OneBit")]
        found[name].append(_trained(make(), lambda model: sync.uniform_plan(model, "OneBit")))
        if form == "fsdp":
            found[name] += [_trained(make(), "OneBit", weights=each) for each in ("BlockQuant", "BlockQuant(bits=4)")]
    return found


def in_dtypes_of_all_forms() -> list[dict[str, list[Any]]]:
    return [in_dtypes(form) for form in ("fsdp", "one shard")]


def test_what_no_compressor_takes_is_left_to_fsdp_with_a_warning():
    for forms in values_of(run_ranks(2, in_dtypes_of_all_forms)):
        for found in forms:
            for name, ((alone, *_), *others) in found.items():
                for index, (attached, sent, warned) in enumerate(others):
                    assert sent == 0, name
                    assert any(DTYPES[name][2] in each for each in warned), (name, index, warned)
                    encodes = index > 1 and name in ("computed in bf16", "reduced in fp64")
                    assert (attached == alone) != encodes, (name, index)
                    is_said = any("FSDP gathers parameters in float64" in each for each in warned)
                    assert is_said == (index > 1 and not encodes), (name, index)


def failing() -> str:
    """The error of an average that fails in place of a group's."""

    def average(vector: torch.Tensor, operation: Any) -> bool:
        raise RuntimeError("gckernels: synchronisation failed")

    assert dist.group.WORLD is not None
    try:
        dist.all_reduce(torch.ones(3), group=ReplicaGroup(dist.group.WORLD, average))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_error_of_an_average_is_raised_as_it_is():
    assert values_of(run_ranks(2, failing)) == ["RuntimeError: gckernels: synchronisation failed"] * 2


def frozen_and_thawed(form: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients of a step after a change of the plan that follows a thaw, beside FSDP's own."""
    ours, theirs = _model(form), _model(form)
    attachment = sync.attach(ours, "BlockQuant")

    def step(number: int) -> list[list[torch.Tensor]]:
        found = []
        for model in (ours, theirs):
            model.zero_grad()
            generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
            model(torch.randn(4, 12, generator=generator)).square().mean().backward()
            found.append([each.grad.to_local().clone() for each in model.parameters() if each.grad is not None])
        return found

    for number, freezes in enumerate((False, True, True, False)):
        for model in (ours, theirs):
            model.first.weight.requires_grad_(not freezes)
        if not freezes and number:
            attachment.change_plan(sync.uniform_plan(ours, "Cast16"))
        step(number)
    pairs = zip(*step(4), strict=True)
    assert len(attachment.plan.units) == 5
    attachment.close()
    return list(pairs)


def test_a_change_of_the_plan_knows_which_parameters_have_been_thawed():
    for form in ("fsdp", "one shard"):
        for pairs in values_of(run_ranks(2, frozen_and_thawed, form)):
            assert len(pairs) == 5
            for compressed, alone in pairs:
                torch.testing.assert_close(compressed, alone, rtol=2**-7, atol=2**-8 * float(alone.abs().max()))
