"""Under a gradient scaler, skipped steps and changes of the scale leave no trace in the residuals."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch

from audits import Ledger, Run
from gckernels.sync import Plan
from gckernels.sync.resources.memory_spaces import Places
from models import build
from ranks import run_ranks, values_of
from scaled_trainings import FRONTS, SKIPPED, STEPS, Training, same, scaler_of
from workloads import digest_of

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


def no_trace(front: str, cases: list[tuple[str, str]], bits: int = 32) -> list[tuple[str, str, float]]:
    """For every case the digest of a training with a scaler, whose scale grows and backs off. Then that of a training
    without one, which counts the skipped steps but does not see them, and the largest scale divided by the smallest."""
    found = []
    for (spec, program), optimizers in itertools.product(cases, (plain, fused)):
        scaled = Training(front, spec, program, scaler_of(), optimizers=optimizers, residual_bits=bits)
        scales = set()
        for number in range(STEPS):
            before = scaled.residuals()
            scaled.step(number, scaled.skipped(number))
            scales.add(scaled.scaler.get_scale())
            assert same(scaled.residuals(), before) == (number in SKIPPED or number == 0), (spec, number)
        unscaled = Training(front, spec, program, None, optimizers=optimizers, residual_bits=bits)
        for number in range(STEPS):
            if number in SKIPPED:
                unscaled.attachment._frontend.runtime.step += 1
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


def test_residuals_in_8_bits_follow_the_scale():
    for found in values_of(run_ranks(2, no_trace, FRONTS[0], [("BlockQuant(bits=4)", "alltoall")], 8)):
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
                again.attachment._frontend.runtime.step += 1
            else:
                again.step(number, again.skipped(number))
        assert digest_of(again.module.parameters()) == digest_of(whole.module.parameters()), init
        again.attachment.close()
    whole.attachment.close()


@pytest.mark.parametrize("front", FRONTS)
def test_states_are_of_gradients_that_are_not_scaled(front):
    values_of(run_ranks(2, resumed, front))


# -------------------------------------------------------------------- residuals in another memory


def steps_on_the_host() -> None:
    """Skipped steps leave residuals as they are when encoding is on the host with a separate memory, here a
    stand-in."""
    with mock.patch.object(Places, "of", staticmethod(lambda device: Places(device, torch.device("cpu"), apart=True))):
        training = Training("module", "EFSignSGD", "alltoall", scaler_of())
    for number in range(STEPS):
        before = training.residuals()
        training.step(number, training.skipped(number))
        assert same(training.residuals(), before) == (number in SKIPPED or number == 0)
    training.attachment.close()


def test_with_another_memory_for_the_host():
    values_of(run_ranks(2, steps_on_the_host))
