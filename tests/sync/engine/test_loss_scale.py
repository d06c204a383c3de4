"""Under a gradient scaler, changes of the scale and skipped steps leave no trace in the residuals."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gckernels
from audits import Ledger, Run
from gckernels import sync
from gckernels.sync import ALLTOALL, PROGRAMS, Place, Plan, Synchronizer, UnitPlan, attach
from gckernels.sync.attach.budget import plan_nbytes
from gckernels.sync.engine.loss_scale import LossScale
from gckernels.sync.resources.feedback import Feedback
from gckernels.sync.resources.places import Places
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from workloads import digest_of, topology, with_feedback

FRONTS = ("attach", "Synchronizer")
SKIPPED = {2: 0, 3: -1, 6: 0, 7: 0, 10: -1}
"""The steps with an infinite gradient, and the rank that has it."""
STEPS = 13


def scaler_of(init: float = 2.0**14) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=init, growth_interval=2)


class Training:
    """A model under one of the two front ends, trained with some steps that the scaler is to skip."""

    def __init__(
        self,
        front: str,
        spec: str,
        program: str,
        scaler: torch.amp.GradScaler | None,
        notified: bool = True,
        optimizers: Callable[[Any], list[torch.optim.Optimizer]] = lambda p: [torch.optim.SGD(p, lr=0.05)],
    ) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.module = build("Mlp")
        self.parameters = dict(self.module.named_parameters())
        compressor, where = gckernels.from_spec(spec), topology(self.world_size)
        plan = sync.plan(
            self.parameters.items(), compressor, program=PROGRAMS[program], topology=where, world_size=self.world_size
        )
        settings: dict[str, Any] = {"grad_scaler": scaler} if notified else {}
        self.poisoned = ""
        for name, parameter in self.parameters.items():
            parameter.register_hook(lambda grad, name=name: self._poison(name, grad))
        self.model: torch.nn.Module = self.module
        if front == "attach":
            self.model = DistributedDataParallel(self.module, bucket_cap_mb=SMALL_BUCKETS)
            self.attachment: Any = attach(self.model, with_feedback(plan), **settings)
        else:
            self.attachment = Synchronizer(self.module, with_feedback(plan), bucket_cap_mb=SMALL_BUCKETS, **settings)
        self.optimizers, self.scaler = optimizers(self.module.parameters()), scaler

    def _poison(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        return torch.full_like(grad, torch.inf) if name == self.poisoned else grad

    def step(self, number: int, poisoned: str = "") -> None:
        self.poisoned = poisoned
        self.module.zero_grad()
        loss = self.model(self.module.batch(number, self.rank))
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        for optimizer in self.optimizers:
            optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()

    def skipped(self, number: int) -> str:
        """The name of the parameter whose gradient this rank spoils, so that the step is skipped; empty if it spoils
        none."""
        where = SKIPPED.get(number)
        return "layers.2.weight" if where is not None and self.rank == where % self.world_size else ""

    def residuals(self) -> dict[tuple[str, str], torch.Tensor]:
        feedback = self.attachment.state_dict()["feedback"]
        return {(kind, name): values for kind in feedback for name, values in feedback[kind].items()}


def same(first: dict[Any, torch.Tensor], second: dict[Any, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


# -------------------------------------------------------------------- no trace


def fused(parameters: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(parameters, lr=0.05, fused=True)]


def plain(parameters: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(parameters, lr=0.05)]


CASES = [
    ("EFSignSGD", "alltoall"),
    ("TopK(ratio=0.1)", "hierarchical"),
    ("DGC(clip=None)", "allgather"),
    ("Cast16(dtype='bfloat16')", "encoded_allreduce"),
    ("QSGD", "alltoall"),
    ("PowerSGD", "powersgd"),
]


def no_trace(front: str, cases: list[tuple[str, str]]) -> list[tuple[str, str, float]]:
    """For every case: the digest of a training with a scaler, whose scale grows and backs off, the digest of a training
    without one that counts the skipped steps but does not see them, and the largest scale divided by the smallest."""
    found = []
    for (spec, program), optimizers in itertools.product(cases, (plain, fused)):
        scaled = Training(front, spec, program, scaler_of(), optimizers=optimizers)
        scales = set()
        for number in range(STEPS):
            before = scaled.residuals()
            scaled.step(number, scaled.skipped(number))
            scales.add(scaled.scaler.get_scale())
            assert same(scaled.residuals(), before) == (number in SKIPPED or number == 0), (spec, number)
        unscaled = Training(front, spec, program, None, optimizers=optimizers)
        for number in range(STEPS):
            if number in SKIPPED:
                unscaled.attachment._runtime.step += 1
            else:
                unscaled.step(number)
        assert same(scaled.residuals(), unscaled.residuals()), spec
        digests = [digest_of(training.module.parameters()) for training in (scaled, unscaled)]
        found.append((*digests, max(scales) / min(scales)))
        scaled.attachment.close()
        unscaled.attachment.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("front", FRONTS)
def test_a_training_goes_on_as_if_skipped_steps_had_not_been(front):
    for found in values_of(run_ranks(2, no_trace, front, CASES)):
        for scaled, unscaled, range_of_scales in found:
            assert scaled == unscaled and range_of_scales >= 4


# -------------------------------------------------------------------- conservation


def imbalances(front: str) -> list[float]:
    """For every case: the part of the gradients of executed steps that is lost, as a multiple of the rounding bound."""
    found = []
    for spec, program in (("EFSignSGD", "alltoall"), ("BlockQuant(bits=4)", "hierarchical"), ("PowerSGD", "powersgd")):
        training = Training(front, spec, program, scaler_of())
        plan: Plan = training.attachment.plan
        units = {unit.parameter: unit for unit in plan.units}
        run = Run(spec, program, steps=STEPS)
        ledger, twin = Ledger(run, units, training.parameters, training.attachment), build("Mlp")
        for number in range(STEPS):
            twin.load_state_dict(training.module.state_dict())
            twin.zero_grad()
            twin(twin.batch(number, training.rank)).backward()
            training.step(number, training.skipped(number))
            if number not in SKIPPED:
                ledger.add(
                    {name: parameter.grad for name, parameter in twin.named_parameters()},
                    {name: parameter.grad for name, parameter in training.parameters.items()},  # unscaled by the scaler
                )
        imbalance, held = ledger.close()
        assert held > 10  # the imbalance without the residuals
        found.append(imbalance)
        training.attachment.close()
    return found


@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_nothing_is_lost(world_size, front):
    for found in values_of(run_ranks(world_size, imbalances, front)):
        assert max(found) <= 1


def changed_by_skipped_steps() -> list[int]:
    training = Training("attach", "EFSignSGD", "alltoall", scaler_of(), notified=False)
    changed = []
    for number in range(STEPS):
        before = training.residuals()
        training.step(number, training.skipped(number))
        if number in SKIPPED and not same(training.residuals(), before):
            changed.append(number)
    training.attachment.close()
    return changed


def test_residuals_are_lost_if_nobody_tells_of_the_scaler():
    assert values_of(run_ranks(2, changed_by_skipped_steps)) == [list(SKIPPED)] * 2


# -------------------------------------------------------------------- several optimizers


def two_optimizers(front: str, is_fused: bool) -> None:
    def halves(parameters: Any) -> list[torch.optim.Optimizer]:
        listed = list(parameters)
        return [torch.optim.SGD(half, lr=0.05, fused=is_fused) for half in (listed[:4], listed[4:])]

    training = Training(front, "EFSignSGD", "alltoall", scaler_of(), optimizers=halves)
    for number in range(4):
        training.step(number)
    before = training.residuals()
    scale = training.scaler.get_scale()
    training.step(4, "layers.4.weight")
    assert training.scaler.get_scale() < scale
    after = training.residuals()
    for (kind, name), values in after.items():
        assert torch.equal(values, before[kind, name]) == (name == "layers.4.weight"), (kind, name)
    training.attachment.close()


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("front", FRONTS)
def test_of_two_optimizers_one_may_skip_the_step(front, is_fused):
    values_of(run_ranks(2, two_optimizers, front, is_fused))


# -------------------------------------------------------------------- states


def resumed(front: str) -> None:
    """A training saved after a skipped step goes on exactly, whether the new scaler has the same scale or another
    one."""
    whole = Training(front, "EFSignSGD", "alltoall", scaler_of())
    for number in range(8):
        whole.step(number, whole.skipped(number))
    state, module = whole.attachment.state_dict(), {k: v.clone() for k, v in whole.module.state_dict().items()}
    scale = whole.scaler.get_scale()
    for number in range(8, STEPS):
        whole.step(number, whole.skipped(number))
    for init in (scale, 4 * scale, None):
        again = Training(front, "EFSignSGD", "alltoall", None if init is None else scaler_of(init))
        again.step(0)  # its residuals are not those of the state
        again.step(1)
        again.attachment.load_state_dict(state)
        again.module.load_state_dict(module)
        assert same(again.residuals(), {key: state["feedback"][key[0]][key[1]] for key in again.residuals()})
        for number in range(8, STEPS):
            if init is None and number in SKIPPED:
                again.attachment._runtime.step += 1
            else:
                again.step(number, again.skipped(number))
        assert digest_of(again.module.parameters()) == digest_of(whole.module.parameters()), init
        again.attachment.close()
    whole.attachment.close()


@pytest.mark.parametrize("front", FRONTS)
def test_states_are_of_gradients_that_are_not_scaled(front):
    values_of(run_ranks(2, resumed, front))


# -------------------------------------------------------------------- scales at the end of their range


class Shown:
    """A scaler with a given scale."""

    def __init__(self, scale: float) -> None:
        self.scale = torch.tensor(scale)

    def _get_scale_async(self) -> torch.Tensor:
        return self.scale


def remembering(scaler: Any, device: torch.device) -> tuple[LossScale, Feedback, torch.nn.Parameter]:
    """The residuals of one parameter, and the LossScale that protects them."""
    parameter = torch.nn.Parameter(torch.zeros(4, device=device))
    plan = Plan((UnitPlan("a", 4, gckernels.EFSignSGD(), ALLTOALL, True),))
    feedback = Feedback(Places(device, device, apart=False))
    return LossScale(scaler, feedback, plan, {"a": parameter}, device), feedback, parameter


def begin(scale: LossScale) -> None:
    for _, work in scale.begin():
        work()


def test_a_residual_that_is_too_large_for_the_scale_is_there_again_when_that_has_fallen():
    scaler = Shown(2.0)
    scale, feedback, parameter = remembering(scaler, torch.device("cpu"))
    begin(scale)
    kept = feedback.residual("worker", "a", 4).copy_(torch.tensor([3e38, -1.0, 0.0, 2.5]))
    before, optimizer = kept.clone(), torch.optim.SGD([parameter], lr=1.0)
    scale._note(optimizer)
    scaler.scale *= 2
    begin(scale)
    assert kept[0] == torch.inf and kept[1] == -2  # the gradient becomes infinite, so the step is skipped
    scaler.scale /= 2
    state = feedback.state_dict()
    scale.unscale(state)
    assert torch.equal(state["worker"]["a"], before / 2)
    begin(scale)
    assert torch.equal(kept, before)
    scale.close()


@pytest.mark.parametrize("end", [0.0, torch.inf])
def test_a_scale_that_scales_nothing_any_more_changes_no_residual(end):
    scaler = Shown(2.0)
    scale, feedback, _ = remembering(scaler, torch.device("cpu"))
    begin(scale)
    kept = feedback.residual("worker", "a", 4).copy_(torch.arange(4.0))
    scaler.scale.fill_(end)
    begin(scale)
    scaler.scale.fill_(8.0)
    begin(scale)
    assert kept.tolist() == ([0.0] * 4 if end == 0 else [0.0, 4.0, 8.0, 12.0])  # at zero the step counts as skipped
    scale.close()


# -------------------------------------------------------------------- scales that the host cannot read


class OfMeta:
    """A scaler whose scale has no value."""

    def _get_scale_async(self) -> torch.Tensor:
        return torch.empty((), device="meta")


def test_the_host_reads_nothing_of_a_device():
    meta = torch.device("meta")
    scale, feedback, parameter = remembering(OfMeta(), meta)
    for kind in ("worker", "p"):
        feedback.residual(kind, "a", 4)
    stepping = torch.optim.SGD([parameter], lr=1.0)
    for skips in (None, torch.ones((), device=meta), "not seen"):
        works = scale.begin()
        assert [place for place, _ in works] == [Place.DEVICE]
        for _, work in works:
            work()
        scale.unscale(feedback.state_dict())
        if skips != "not seen":
            stepping.found_inf = skips  # type: ignore[attr-defined]
            parameter.grad = torch.empty_like(parameter)
            scale._note(stepping)
    scale.close()


def steps_on_the_host() -> None:
    """Skipped steps leave residuals as they are when encoding is on the host with a separate memory, here a
    stand-in."""
    with mock.patch.object(Places, "of", staticmethod(lambda device: Places(device, torch.device("cpu"), apart=True))):
        training = Training("Synchronizer", "EFSignSGD", "alltoall", scaler_of())
    for number in range(STEPS):
        before = training.residuals()
        training.step(number, training.skipped(number))
        assert same(training.residuals(), before) == (number in SKIPPED or number == 0)
    training.attachment.close()


def test_with_another_memory_for_the_host():
    values_of(run_ranks(2, steps_on_the_host))


# -------------------------------------------------------------------- arguments, warnings, memory


def output(front: str) -> tuple[list[str], list[str]]:
    texts = []
    for scaler, notified in (
        (scaler_of(), False),
        (scaler_of(), True),
        (torch.amp.GradScaler("cpu", enabled=False), False),
    ):
        training = Training(front, "EFSignSGD", "alltoall", scaler, notified)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for number in range(3):
                training.step(number)
        texts.append("; ".join(str(each.message) for each in caught if "gckernels" in str(each.message)))
        training.attachment.close()
    errors = []
    for scaler in ("scaler", scaler_of() if dist.get_rank() else None):
        with pytest.raises((TypeError, RuntimeError)) as raised:
            Training(front, "EFSignSGD", "alltoall", scaler)  # type: ignore[arg-type]
        errors.append(str(raised.value))
    return texts, errors


@pytest.mark.parametrize("front", FRONTS)
def test_a_scaler_that_nobody_tells_of_is_warned_of(front):
    for texts, errors in values_of(run_ranks(2, output, front)):
        assert "grad_scaler=scaler" in texts[0] and texts[0].count("gckernels:") == 1
        assert texts[1:] == ["", ""]
        assert errors[0] == f"{front}: grad_scaler must be a torch.amp.GradScaler or None, got str"
        assert "do not have the same settings" in errors[1] and "with a gradient scaler" in errors[1]


def memory(notified: bool) -> tuple[int, int]:
    training = Training("attach", "EFSignSGD", "alltoall", scaler_of(), notified)
    for number in range(3):
        training.step(number)
    found, plan = training.attachment.residual_nbytes(), training.attachment.plan
    dtypes = {unit.parameter: torch.float32 for unit in plan.units}
    planned = [sum(plan_nbytes(plan, dtypes, plan.topology_of(2), copies=copies)) for copies in (False, True)]
    training.attachment.close()
    return found, planned[1] - planned[0]


def test_copies_are_counted():
    (without, difference), (with_copies, _) = (
        values_of(run_ranks(2, memory, notified))[0] for notified in (False, True)
    )
    assert with_copies == 2 * without == 2 * difference > 0
