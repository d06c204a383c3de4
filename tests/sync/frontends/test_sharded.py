"""Models of ``fully_shard`` over replicas, and of ``replicate``: with nothing compressed they train as without an
attachment, bit for bit; with compression nothing is lost, and replicas stay equal."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from gckernels import sync
from gckernels.sync import Attachment
from ranks import run_ranks, values_of
from workloads import digest_of

STEPS, DEFAULT = 4, MixedPrecisionPolicy()
COMPRESSORS = ("BlockQuant(bits=4)", "EFSignSGD", "TopK(ratio=0.1)", "PowerSGD", "QSGD", "Cast16")


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
    splits: Callable[[Net], Iterator[Any]] = lambda model: iter((model.first, model.last, model))


def _of_parts(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _freeze(model: Net) -> None:
    model.first.weight.requires_grad_(False)


def _tie(model: Net) -> None:
    model.sometimes.weight = model.second.weight


def _no_division(model: Any) -> None:
    for part in _of_parts(model):
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
    "keeps parameters": Setting(prepare=lambda model: model.set_reshard_after_backward(False)),
}


def _replicated(model: Net, mesh: DeviceMesh) -> Net:
    from torch.distributed._composable.replicate_with_fsdp import replicate

    for each in (model.first, model.second, model):
        replicate(each, mesh=mesh)
    return model


def _model(setting: Setting, shards: int = 2) -> Any:
    """A model on all ranks, with as many shards as given; 0 for ``replicate``."""
    torch.manual_seed(0)
    model, world_size = Net(), dist.get_world_size()
    setting.make(model)
    if not shards:
        return _replicated(model, init_device_mesh("cpu", (world_size,), mesh_dim_names=("replicate",)))
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (world_size // shards, shards), mesh_dim_names=names)
    for each in setting.splits(model):
        fully_shard(each, mesh=mesh, mp_policy=setting.policy)
    setting.prepare(model)
    return model


def _train(model: Any, setting: Setting, steps: range, optimizer: torch.optim.Optimizer) -> None:
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


def _optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 1e-2)


def _shards(model: Any) -> list[torch.Tensor]:
    for part in _of_parts(model):
        part.reshard()
    return [each.to_local() for each in model.parameters()]


def _digest(model: Any) -> str:
    return digest_of(_shards(model))


def _exactly(names: list[str], shards: int) -> dict[str, tuple[str, str, int]]:
    """By setting: digests without an attachment and with one that compresses nothing, and the steps of the latter."""
    found = {}
    for name in names:
        setting, digests, attachment = SETTINGS[name], [], None
        for plan in (None, "Identity"):
            model = _model(setting, shards)
            attachment = None if plan is None else sync.attach(model, plan)
            _train(model, setting, range(STEPS), _optimizer(model))
            digests.append(_digest(model))
        assert attachment is not None
        found[name] = (*digests, attachment.steps)
        attachment.close()
    return found


@pytest.mark.parametrize("shards", [2, 1], ids=["2x2", "4x1"])
def test_nothing_changes_if_nothing_is_compressed(shards):
    for found in values_of(run_ranks(4, _exactly, list(SETTINGS), shards)):
        for name, (alone, attached, steps) in found.items():
            assert attached == alone, name
            assert steps == STEPS * (2 if name == "every microbatch" else 1), name


def test_nothing_changes_in_a_replicated_model_if_nothing_is_compressed():
    for found in values_of(run_ranks(2, _exactly, ["plain", "accumulates", "clips"], 0)):
        assert all(attached == alone for alone, attached, _ in found.values())


def _compressed(specs: tuple[str, ...], shards: int) -> dict[str, tuple[str, float, float, float]]:
    """By compressor: the digest, bytes that were sent and would be sent, and the norm of residuals."""
    found = {}
    for spec in specs:
        model = _model(SETTINGS["plain"], shards)
        attachment = sync.attach(model, spec)
        _train(model, SETTINGS["plain"], range(STEPS), _optimizer(model))
        stats = attachment.stats()
        found[spec] = (_digest(model), stats["sent_nbytes"], stats["plain_nbytes"], stats["residual_nbytes"])
        attachment.close()
    return found


@pytest.mark.parametrize("shards", [2, 0], ids=["2x2", "replicate"])
def test_replicas_stay_equal_bit_for_bit(shards):
    ranks = values_of(run_ranks(4, _compressed, COMPRESSORS, shards))
    for spec in COMPRESSORS:
        digests = [found[spec][0] for found in ranks]
        if shards:
            assert digests[0] == digests[2] and digests[1] == digests[3] and digests[0] != digests[1], spec
        else:
            assert len(set(digests)) == 1, spec
        _, sent, plain, _ = ranks[0][spec]
        assert 0 < sent < plain, spec


class Straight(nn.Module):
    """A model whose gradients do not depend on its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 33), nn.Linear(7, 20)

    def forward(self, inputs: torch.Tensor, uses_all: bool = True) -> torch.Tensor:
        second = (2 * self.second(inputs)).sum()
        return self.first(inputs).sum() + second if uses_all else second


def _conserving(spec: str | None, leaves: bool) -> list[torch.Tensor]:
    """The shards after steps of SGD, the last of which send what residuals hold; those of a layer that is not used
    meanwhile come later."""
    torch.manual_seed(0)
    model: Any = Straight()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for each in (model.first, model):
        fully_shard(each, mesh=mesh)
    attachment = None if spec is None else sync.attach(model, spec)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for step in range(18 if leaves else 6):
        if attachment is not None and step == 4:
            attachment.change_plan(sync.uniform_plan(model, "Identity", world_size=2))
        inputs = torch.randn(5, 7, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(inputs, uses_all=not leaves or not 4 <= step < 17).backward()
        optimizer.step()
        optimizer.zero_grad()
    if attachment is not None:
        assert not attachment.is_changing and not attachment.residual_nbytes()
        attachment.close()
    return _shards(model)


@pytest.mark.parametrize(
    ("spec", "leaves"), [("BlockQuant(bits=4)", False), ("BlockQuant(bits=4)", True), ("TopK(ratio=0.1)", False)]
)
def test_nothing_is_lost(spec, leaves):
    trained = (values_of(run_ranks(4, _conserving, each, leaves)) for each in (None, spec))
    for exact, compressed in zip(*trained, strict=True):
        torch.testing.assert_close(compressed, exact, rtol=1e-4, atol=1e-5)


def _resumed(spec: str, path: str | None) -> tuple[str, str]:
    """The digests of a training, and of one that was interrupted; with a path, DCP saves its residuals there."""
    setting, digests = SETTINGS["plain"], []
    for interrupted in (False, True):
        model = _model(setting)
        attachment, optimizer = sync.attach(model, spec), _optimizer(model)
        _train(model, setting, range(3), optimizer)
        if interrupted:
            kept = [each.clone() for each in _shards(model)]
            states = optimizer.state_dict(), attachment.state_dict()
            if path is not None:
                dcp.save({"gckernels": attachment.checkpoint()}, checkpoint_id=path)
            attachment.close()
            model = _model(setting)
            with torch.no_grad():
                for parameter, each in zip(model.parameters(), kept, strict=True):
                    parameter.to_local().copy_(each)
            attachment, optimizer = sync.attach(model, spec), _optimizer(model)
            optimizer.load_state_dict(states[0])
            if path is None:
                attachment.load_state_dict(states[1])
            else:
                dcp.load({"gckernels": attachment.checkpoint(reads=path)}, checkpoint_id=path)
        _train(model, setting, range(3, 6), optimizer)
        digests.append(_digest(model))
        attachment.close()
    return digests[0], digests[1]


@pytest.mark.parametrize("by_dcp", [False, True], ids=["own", "dcp"])
def test_a_resumed_training_goes_on_bit_for_bit(by_dcp, tmp_path):
    for spec in ("BlockQuant(bits=4)", "PowerSGD"):
        for whole, resumed in values_of(run_ranks(4, _resumed, spec, str(tmp_path / spec) if by_dcp else None)):
            assert resumed == whole, spec


class Interrupted(Exception):
    """Ends a backward in the middle."""


def _interrupted() -> tuple[str, str, int]:
    """The digests of trainings without and with an attachment, a backward of which is given up; the counted steps."""
    setting, digests, attachment = SETTINGS["plain"], [], None
    for plan in (None, "Identity"):
        model = _model(setting)
        attachment = None if plan is None else sync.attach(model, plan)
        optimizer = _optimizer(model)
        _train(model, setting, range(2), optimizer)

        def fail(*_: object) -> None:
            raise Interrupted

        hook = model.first.register_full_backward_pre_hook(fail)
        with contextlib.suppress(Interrupted):
            _train(model, setting, range(2, 3), optimizer)
        hook.remove()
        optimizer.zero_grad()
        for part in _of_parts(model):
            part._get_fsdp_state()._state_ctx.post_backward_final_callback_queued = False  # FSDP would do nothing more
        _train(model, setting, range(3, 5), optimizer)
        digests.append(_digest(model))
    assert attachment is not None
    steps = attachment.steps
    attachment.close()
    return digests[0], digests[1], steps


def test_a_backward_that_fails_is_not_counted():
    for alone, attached, steps in values_of(run_ranks(4, _interrupted)):
        assert attached == alone
        assert steps == 4


def _closed() -> tuple[str, str, bool]:
    """The digests of steps without an attachment, and after one was closed; whether FSDP has its own group again."""
    setting, digests, group = SETTINGS["plain"], [], None
    for attaches in (False, True):
        model = _model(setting)
        group = _groups(model)
        if attaches:
            attachment = sync.attach(model, "EFSignSGD")
            assert _groups(model) != group
            attachment.close()
        _train(model, setting, range(STEPS), _optimizer(model))
        digests.append(_digest(model))
    return digests[0], digests[1], _groups(model) == group


def _groups(model: Any) -> list[Any]:
    from gckernels.sync.frontends.sharded.shard_groups import shard_groups

    return [each.replicas for each in shard_groups(model)]


def test_a_closed_attachment_leaves_the_model_as_it_was():
    for alone, closed, is_own in values_of(run_ranks(4, _closed)):
        assert closed == alone
        assert is_own


def _tuned() -> tuple[str, str, str]:
    """The digest of a training, the plan that was found, and the plan of the resumed training."""
    model = _model(SETTINGS["plain"])
    attachment = sync.attach(model)
    _train(model, SETTINGS["plain"], range(60), _optimizer(model))
    found, state = attachment.plan.fingerprint(), attachment.state_dict()
    digest = _digest(model)
    attachment.close()
    resumed = sync.attach(_model(SETTINGS["plain"]))
    resumed.load_state_dict(state)
    again = resumed.plan.fingerprint()
    resumed.close()
    return digest, found, again


def test_a_plan_is_found_while_the_model_is_trained():
    ranks = values_of(run_ranks(4, _tuned))
    assert all(again == found == ranks[0][1] for _, found, again in ranks)
    assert ranks[0][0] == ranks[2][0]


def _refused(attempt: str) -> str:
    attempts: dict[str, Callable[[], Attachment]] = {
        "flat": lambda: sync.attach(fully_shard(Net(), mesh=init_device_mesh("cpu", (4,))), "EFSignSGD"),
        "scaler": lambda: sync.attach(_model(SETTINGS["plain"]), "EFSignSGD", can_discard=True),
        "budget": lambda: sync.attach(_model(SETTINGS["plain"]), "EFSignSGD", memory_budget_mb=1.0),
        "group": lambda: sync.attach(_model(SETTINGS["plain"]), "EFSignSGD", bucket_cap_mb=1.0),
        "parts": lambda: _with_parts(),
        "twice": lambda: _twice(),
    }
    try:
        attempts[attempt]()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _with_parts() -> Attachment:
    model = _model(SETTINGS["plain"])
    return sync.attach(model, sync.uniform_plan(model, "EFSignSGD", world_size=2).parted(16))


def _twice() -> Attachment:
    model = _model(SETTINGS["plain"])
    first = sync.attach(model, "EFSignSGD")
    try:
        return sync.attach(model, "EFSignSGD")
    finally:
        first.close()


class Reentrant(nn.Module):
    """A layer whose backward is a backward of its own inside that of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(33, 12)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, inputs, use_reentrant=True)


def _in_parts() -> str:
    setting = Setting(
        make=lambda model: setattr(model, "second", Reentrant()),
        splits=lambda model: iter((model.second.inner, model)),
    )
    model = _model(setting)
    attachment = sync.attach(model, "EFSignSGD")
    try:
        _train(model, setting, range(1), _optimizer(model))
    except RuntimeError as error:
        return str(error)
    finally:
        attachment.close()
    return ""


def test_a_backward_in_parts_is_refused():
    for text in values_of(run_ranks(2, _in_parts)):
        assert "use use_reentrant=False" in text


REFUSED = {
    "flat": "TypeError: attach: the model is not supported, it is sharded by FSDP over all ranks",
    "scaler": "ValueError: attach: grad_scaler and can_discard must be",
    "budget": "ValueError: attach: memory_budget_mb must be None for a model of fully_shard or replicate",
    "group": "ValueError: attach: bucket_cap_mb must be None for",
    "parts": "PlanError: plan has parts of parameters",
    "twice": "ValueError: attach: parameter",
}


@pytest.mark.parametrize("attempt", REFUSED)
def test_what_is_not_supported_is_refused_on_all_ranks(attempt):
    for text in values_of(run_ranks(4, _refused, attempt)):
        assert text.startswith(REFUSED[attempt])
