"""Models of ``fully_shard`` and ``replicate``, ways to train them, and what is compared of them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from gckernels import sync
from workloads import digest_of

DEFAULT = MixedPrecisionPolicy()


class Net(nn.Module):
    """Layers whose first dimension two ranks cannot share evenly, and one that not every step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(7, 33), nn.Linear(33, 12), nn.Linear(12, 1)
        self.sometimes = nn.Linear(33, 12)

    def forward(self, inputs: torch.Tensor, uses_all: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.first(inputs))
        mixed = self.second(hidden) + self.sometimes(hidden) if uses_all else self.second(hidden)
        return self.last(torch.tanh(mixed))


@dataclass
class Setting:
    """A way of training.

    Attributes:
        make: changes the model before it is sharded.
        policy: the precision of FSDP.
        prepare: changes the sharded model before it is attached.
        micro: microbatches of a step.
        before: called with the model before each microbatch, and whether it is the last one of the step.
        after: called with the model when the gradients of a step are there.
        forward: computes outputs.
        uses_all: whether a step uses all parameters.
        options: further arguments of ``fully_shard``.
        splits: groups the modules for ``fully_shard``.
    """

    make: Callable[[Net], object] = lambda model: None
    policy: MixedPrecisionPolicy = DEFAULT
    prepare: Callable[[Any], object] = lambda model: None
    micro: int = 1
    before: Callable[[Any, bool], object] = lambda model, is_last: None
    after: Callable[[Any], object] = lambda model: None
    forward: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda model, inputs: model(inputs)
    uses_all: Callable[[int], bool] = lambda step: True
    options: Mapping[str, Any] = field(default_factory=dict)
    splits: Callable[[Net], Iterator[Any]] = lambda model: iter((model.first, model.last, model))


def fsdp_modules(model: Any) -> list[Any]:
    """The modules that FSDP knows."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _freeze(model: Net) -> None:
    model.first.weight.requires_grad_(False)


def _tie(model: Net) -> None:
    model.sometimes.weight = model.second.weight


def _prefetch(model: Any) -> None:
    first, *others = fsdp_modules(model)  # the root and its parts
    first.set_modules_to_forward_prefetch(others)
    for before, after in itertools.pairwise(others):
        before.set_modules_to_forward_prefetch([after])
        after.set_modules_to_backward_prefetch([before])


def _no_division(model: Any) -> None:
    for part in fsdp_modules(model):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


BF16 = torch.bfloat16
SETTINGS = {
    "plain": Setting(),
    "accumulates": Setting(micro=2, before=lambda model, is_last: model.set_requires_gradient_sync(is_last)),
    "sums last": Setting(micro=2, before=lambda model, is_last: model.set_requires_all_reduce(is_last)),
    "every microbatch": Setting(micro=2, before=lambda model, is_last: model.set_is_last_backward(is_last)),
    "bf16": Setting(policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)),
    "bf16, reduced in fp32": Setting(policy=MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)),
    "tied": Setting(make=_tie),
    "compiled": Setting(make=lambda model: model.second.compile(backend="eager")),
    "frozen": Setting(prepare=_freeze),
    "clips": Setting(after=lambda model: clip_grad_norm_(model.parameters(), 0.01)),
    "sums": Setting(prepare=_no_division, after=lambda model: clip_grad_norm_(model.parameters(), 0.01)),
    "checkpoints": Setting(forward=lambda model, inputs: checkpoint(model, inputs, use_reentrant=False)),
    "groups": Setting(splits=lambda model: iter(([model.first, model.last], model))),
    "bare root": Setting(splits=lambda model: iter((model.first, model.second, model.last, model.sometimes, model))),
    "sometimes unused": Setting(uses_all=lambda step: step % 2 == 0),
    "keeps parameters after forward": Setting(options={"reshard_after_forward": False}),
    "prefetches": Setting(prepare=_prefetch),
    "keeps parameters": Setting(prepare=lambda model: model.set_reshard_after_backward(False)),
}


def _replicated(model: Net, mesh: DeviceMesh) -> Net:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    for each in (model.first, model.second, model):
        replicate(each, mesh=mesh)
    return model


FORMS = ("hsdp", "three shards", "one shard", "replicate", "fsdp")
"""Replicas with two shards each, or three, or one; replicas of whole parameters; shards on all ranks."""


def model_of(setting: Setting, form: str) -> Any:
    """A model on all ranks, of one of the :data:`FORMS`."""
    torch.manual_seed(0)
    model, ranks = Net(), dist.get_world_size()
    setting.make(model)
    if form == "replicate":
        return _replicated(
            model, init_device_mesh(torch.get_default_device().type, (ranks,), mesh_dim_names=("replicate",))
        )
    split(model, setting.splits(model), form, mp_policy=setting.policy, **setting.options)
    setting.prepare(model)
    return model


def split(model: Any, modules: Iterable[Any], form: str, **options: Any) -> None:
    """Shard a model, module by module, for one of the :data:`FORMS` with shards."""
    ranks, replicated = dist.get_world_size(), ("replicate", "shard")
    match form:
        case "hsdp":
            mesh = init_device_mesh(torch.get_default_device().type, (ranks // 2, 2), mesh_dim_names=replicated)
        case "three shards":
            mesh = init_device_mesh(torch.get_default_device().type, (ranks // 3, 3), mesh_dim_names=replicated)
        case "one shard":
            mesh = init_device_mesh(torch.get_default_device().type, (ranks, 1), mesh_dim_names=replicated)
        case _:
            mesh = init_device_mesh(torch.get_default_device().type, (ranks,), mesh_dim_names=("shard",))
    for each in modules:
        fully_shard(each, mesh=mesh, **options)


def train(model: Any, setting: Setting, steps: range, optimizer: torch.optim.Optimizer) -> None:
    """Train for the steps of these numbers."""
    for step in steps:
        for micro in range(setting.micro):
            setting.before(model, micro == setting.micro - 1)
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + dist.get_rank())
            inputs, uses_all = torch.randn(5, 7, generator=generator), setting.uses_all(step)
            forward = setting.forward if uses_all else lambda model, inputs: model(inputs, uses_all=False)
            forward(model, inputs).float().pow(2).mean().backward()
        setting.after(model)
        optimizer.step()
        optimizer.zero_grad()


def adamw(model: Any) -> torch.optim.Optimizer:
    """An optimizer of what is not frozen."""
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 1e-2)


def shards_of(model: Any) -> list[torch.Tensor]:
    """The parts of this rank in all parameters."""
    for part in fsdp_modules(model):
        part.reshard()
    return [each.to_local() for each in model.parameters()]


def digest(model: Any) -> str:
    """The digest of the parts of this rank."""
    return digest_of(shards_of(model))


class Straight(nn.Module):
    """A model whose gradients do not depend on its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 33), nn.Linear(7, 20)

    def forward(self, inputs: torch.Tensor, uses_all: bool = True) -> torch.Tensor:
        second = (2 * self.second(inputs)).sum()
        return self.first(inputs).sum() + second if uses_all else second


class Reentrant(nn.Module):
    """A layer whose backward is a backward of its own inside the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(33, 12)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = checkpoint(self.inner, inputs, use_reentrant=True)
        return outputs


def conserving(
    spec: str | None, leaves: bool, form: str, bits: int = 32, topology: tuple[int, int] | None = None
) -> list[torch.Tensor]:
    """The shards after steps of SGD, the last of which send what residuals hold; those of a layer that is not used
    meanwhile come later."""
    torch.manual_seed(0)
    model: Any = Straight()
    split(model, (model.first, model), form)
    plan_of = functools.partial(sync.uniform_plan, model, topology=topology)
    attachment = None if spec is None else sync.attach(model, plan_of(spec), residual_bits=bits)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(18 if leaves else 6):
        if attachment is not None and step == 4:
            attachment.change_plan(plan_of("Identity"))
        inputs = torch.randn(5, 7, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(inputs, uses_all=not leaves or not 4 <= step < 17).backward()
        optimizer.step()
        optimizer.zero_grad()
    if attachment is not None:
        assert not attachment.is_changing and not attachment.residual_nbytes()
        attachment.close()
    return shards_of(model)
