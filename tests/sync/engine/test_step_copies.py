"""The scale of a loss in residuals: at the ends of its range, on a device, in warnings, and in memory."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gckernels
from gckernels.sync import Plan, UnitPlan
from gckernels.sync.engine.step_copies import StepCopies
from gckernels.sync.frontends.budget import plan_nbytes
from gckernels.sync.programs import ALLTOALL, Place
from gckernels.sync.resources.feedback import Feedback
from gckernels.sync.resources.memory_spaces import Places
from ranks import run_ranks, values_of
from scaled_trainings import FRONTS, Training, scaler_of

# -------------------------------------------------------------------- scales at the end of their range


class Shown:
    """A scaler with a given scale."""

    def __init__(self, scale: float) -> None:
        self.scale = torch.tensor(scale)

    def _get_scale_async(self) -> torch.Tensor:
        return self.scale


def remembering(scaler: Any, device: torch.device) -> tuple[StepCopies, Feedback, torch.nn.Parameter]:
    """The residuals of one parameter, and the StepCopies that protects them."""
    parameter = torch.nn.Parameter(torch.zeros(4, device=device))
    plan = Plan((UnitPlan("a", 4, gckernels.EFSignSGD(), ALLTOALL, True),))
    feedback = Feedback(Places(device, device, apart=False))
    return StepCopies(scaler, feedback, plan, {"a": parameter}, device), feedback, parameter


def begin(scale: StepCopies) -> None:
    for _, work in scale.begin():
        work()


def test_a_residual_that_is_too_large_for_the_scale_is_there_again_when_that_has_fallen():
    scaler = Shown(2.0)
    scale, feedback, parameter = remembering(scaler, torch.device("cpu"))
    begin(scale)
    kept = feedback.residual("worker", "a", 4).tensor.copy_(torch.tensor([3e38, -1.0, 0.0, 2.5]))
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
    kept = feedback.residual("worker", "a", 4).tensor.copy_(torch.arange(4.0))
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


# -------------------------------------------------------------------- arguments, warnings, memory


def output(front: str) -> tuple[list[str], list[str]]:
    texts = []
    for scaler, notified in (
        (scaler_of(), False),
        (scaler_of(), True),
        (torch.amp.GradScaler(torch.get_default_device().type, enabled=False), False),
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
        assert errors[0] == "attach: grad_scaler must be a torch.amp.GradScaler or None, got str"
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
