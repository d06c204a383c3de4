"""Residuals of a layer's gradients do not count if the training throws these away before the step."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_models import attached
from gckernels import sync
from models import build
from ranks import run_ranks, values_of
from scaled_trainings import FRONTS, scaler_of
from workloads import digest_of

LAYER = "layers.4.weight"


class Cancelling:
    """A training without effect on the parameters, that throws away gradients of a layer in some steps."""

    def __init__(self, front: str, spec: str, program: str, copies: str = "", lr: float = 0.0) -> None:
        self.module: Any = build("Mlp")
        topology = (2, 1) if program == "hierarchical" else None
        plan = sync.uniform_plan(self.module, spec, program=program, exempt=None, topology=topology)
        self.scaler = scaler_of() if copies == "scaler" else None
        options = {"can_discard": copies == "discard"} if self.scaler is None else {"grad_scaler": self.scaler}
        self.model, self.handle = attached(front, self.module, plan, **options)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=lr)
        self.layer = self.module.get_parameter(LAYER)

    def step(self, number: int, cancels: str = "") -> None:
        self.optimizer.zero_grad()
        loss = self.model(self.module.batch(number, dist.get_rank()))
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if cancels == "None":
            self.layer.grad = None
        elif cancels == "zero":
            self.layer.grad.zero_()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def residuals(self) -> dict[tuple[str, str], torch.Tensor]:
        feedback = self.handle.state_dict()["feedback"]
        return {(kind, key): each for kind in feedback for key, each in feedback[kind].items()}


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.equal(one, other))


def cancelled(front: str, spec: str, program: str, copies: str, cancels: str) -> str:
    """Throw away gradients of a layer for some steps. Other layers train on, and with copies this one has what it had;
    without, nothing. Its next gradient is the one of a training that begins there. Returns a digest of that."""
    training, control = (Cancelling(front, spec, program, copies) for _ in range(2))
    for number in range(3):
        training.step(number)
        control.step(number)
    before = training.residuals()
    for number in range(3, 7):
        training.step(number, cancels)
        control.step(number)
    after, kept = training.residuals(), control.residuals()
    for (kind, key), values in after.items():
        if key != LAYER or kind in ("p", "q"):
            assert same(values, kept[kind, key]) or key == LAYER, (kind, key)
        elif copies:
            assert same(values, before[kind, key]), kind
        else:
            assert not values.any(), kind
    training.step(7)
    digest = digest_of(each.grad for each in training.module.parameters())
    assert training.residuals()["worker", LAYER].any()
    training.handle.close()
    control.handle.close()
    return digest


CASES = [("EFSignSGD", "alltoall"), ("ChunkTopK", "hierarchical"), ("PowerSGD", "powersgd")]
WAYS = [("", "None"), ("", "zero"), ("discard", "None"), ("scaler", "None")]


def all_cancelled(front: str, cases: list[tuple[str, str, str, str]]) -> list[str]:
    return [cancelled(front, *case) for case in cases]


@pytest.mark.host_only("the host does not read gradients of a device")
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize(
    "cases",
    [
        [(*CASES[0], *how) for how in WAYS],
        pytest.param([(*case, *how) for case in CASES[1:] for how in WAYS], marks=pytest.mark.slow),
    ],
    ids=["signs", "others"],
)
def test_steps_do_not_count_for_a_layer_whose_gradients_are_thrown_away(front, cases):
    found = values_of(run_ranks(2, all_cancelled, front, cases))
    assert found[0] == found[1]


def used(front: str, pattern: str) -> None:
    """Trainings that use every gradient keep their residuals, as without an optimizer of torch."""
    found = []
    for by_hand in (False, True):
        training = Cancelling(front, "EFSignSGD", "allgather")
        apart = training.model.no_sync if front == "attach" else training.handle.no_sync
        for number in range(4):
            training.optimizer.zero_grad()
            with apart() if pattern == "accumulated" else contextlib.nullcontext():
                training.model(training.module.batch(number, dist.get_rank())).backward()
            if pattern in ("accumulated", "synchronised"):
                training.model(training.module.batch(number + 10, dist.get_rank())).backward()
            if not by_hand:
                training.optimizer.step()
                if pattern == "twice":
                    training.optimizer.zero_grad()
                    training.optimizer.step()
        found.append(training.residuals())
        training.handle.close()
    assert found[0].keys() == found[1].keys()
    for key, values in found[0].items():
        assert values.any() and same(values, found[1][key]), (pattern, key)


def closures(front: str) -> None:
    """An optimizer that calls backward in its step has used the gradients that are cleared before the next one."""
    training = Cancelling(front, "EFSignSGD", "allgather")
    optimizer = torch.optim.LBFGS(training.module.parameters(), lr=0.0, max_iter=2, tolerance_change=-1)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = training.model(training.module.batch(0, dist.get_rank()))
        value.backward()
        return value

    for _ in range(3):
        optimizer.zero_grad()
        optimizer.step(loss)
    optimizer.zero_grad()
    assert all(values.any() for values in training.residuals().values())
    training.handle.close()


def all_used(front: str) -> None:
    for pattern in ("plain", "accumulated", "synchronised", "twice"):
        used(front, pattern)
    closures(front)


@pytest.mark.parametrize("front", ["attach", pytest.param("module", marks=pytest.mark.slow)])
def test_residuals_of_gradients_that_are_used_stay(front):
    values_of(run_ranks(2, all_used, front))


def not_stepped(front: str) -> list[str]:
    """Warnings of a training in which the optimizer of a layer makes no step, and its gradients are cleared."""
    training = Cancelling(front, "EFSignSGD", "allgather")
    others = torch.optim.SGD([each for each in training.module.parameters() if each is not training.layer], lr=0.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(5):
            training.module.zero_grad()
            training.model(training.module.batch(number, dist.get_rank())).backward()
            others.step()
    training.handle.close()
    return [str(each.message) for each in caught if "cleared before an optimizer of torch" in str(each.message)]


@pytest.mark.parametrize("front", ["module", pytest.param("attach", marks=pytest.mark.slow)])
def test_a_layer_whose_optimizer_makes_no_step_is_named_once(front):
    for texts in values_of(run_ranks(2, not_stepped, front)):
        assert len(texts) == 1 and f"used them: {LAYER}." in texts[0]
