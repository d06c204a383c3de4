"""Steps that a training discards leave no trace in residuals, and exact passes leave residuals alone."""

from __future__ import annotations

import contextlib
import gc
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

import gckernels
from ddp_models import attached
from gckernels import sync
from models import build
from ranks import run_ranks, values_of
from scaled_trainings import FRONTS, Training, same, scaler_of
from workloads import digest_of, mass_of, summed, thinned

STEPS, DISCARDED = 9, (2, 3, 6)
CASES = [
    ("EFSignSGD", "alltoall"),
    ("TopK(ratio=0.1)", "hierarchical"),
    ("DGC(clip=None)", "allgather"),
    ("PowerSGD", "powersgd"),
]

# -------------------------------------------------------------------- no trace


def trained(front: str, spec: str, program: str, scaled: bool, pattern: str) -> str:
    """The digest of a training some of whose steps do not count, as the ``pattern`` says."""
    training = Training(front, spec, program, scaler_of() if scaled else None, can_discard=not scaled)
    for number in range(STEPS):
        if number not in DISCARDED:
            training.step(number)
            continue
        if pattern == "not seen":
            training.attachment._frontend.runtime.step += 1
            continue
        before = training.residuals()
        with training.attachment.exact() if pattern == "exact" else contextlib.nullcontext():
            training.backward(number, training.skipped(2))
        if pattern == "discarded":
            assert not same(training.residuals(), before)
            training.attachment.discard_step()
            training.attachment.discard_step()  # once more changes nothing
        assert same(training.residuals(), before)
    training.attachment.close()
    return digest_of(training.module.parameters())


def digests(front: str, cases: list[tuple[str, str, bool]]) -> list[dict[str, str]]:
    patterns = ("not seen", "discarded", "exact")
    return [{pattern: trained(front, *case, pattern) for pattern in patterns} for case in cases]


# `make test` takes every case, with one of the front ends
@pytest.mark.parametrize(
    ("front", "turn"), thinned([(front, turn) for turn in (0, 1) for front in (FRONTS[turn], FRONTS[1 - turn])], 2)
)
def test_a_training_goes_on_as_if_those_steps_had_not_been(front, turn):
    cases = ([(*case, False) for case in CASES] + [(*CASES[0], True)])[turn::2]
    for found in values_of(run_ranks(2, digests, front, cases)):
        for case, each in zip(cases, found, strict=True):
            assert len(set(each.values())) == 1, case


def unused_while_changing(front: str, is_exact: bool) -> tuple[list[bool], float]:
    """Discard steps of a change of the plan, or make them leave residuals alone. Return whether the plan was still
    changing after each step, and the largest difference between what was given and what was got or is held."""
    training = Training(front, "EFSignSGD", "allgather", None, can_discard=not is_exact)
    names, world_size = list(training.parameters), dist.get_world_size()
    given = {name: torch.zeros(each.numel(), dtype=torch.float64) for name, each in training.parameters.items()}
    changing = []
    for number in range(9):
        if number == 4:
            other = sync.uniform_plan(training.parameters.items(), gckernels.BlockQuant(), world_size=world_size)
            training.attachment.change_plan(other)
        inputs = training.module.batch(number, training.rank)
        mine = torch.autograd.grad(training.module(inputs), list(training.parameters.values()))
        counts = number not in (3, 4)
        with contextlib.nullcontext() if counts or not is_exact else training.attachment.exact():
            training.backward(number)
        changing.append(training.attachment.is_changing)
        if not counts:
            if not is_exact:
                training.attachment.discard_step()
            continue
        for name, gradient in zip(names, mine, strict=True):
            got = training.parameters[name].grad
            assert got is not None
            given[name] += summed(gradient.flatten().double()) / world_size - got.flatten().double()
    held = {key: mass[-1] for key, mass in mass_of(training.attachment).items()}
    training.attachment.close()
    return changing, max(float((given[name] - held[name]).abs().max()) for name in names)


@pytest.mark.parametrize("is_exact", [False, True], ids=["discarded", "exact"])
@pytest.mark.parametrize("front", FRONTS)
def test_a_change_of_the_plan_sends_what_an_unused_step_has_not(front, is_exact):
    for changing, difference in values_of(run_ranks(2, unused_while_changing, front, is_exact)):
        assert changing == [False] * 4 + [True] * (1 if is_exact else 2) + [False] * (4 if is_exact else 3)
        assert difference < 1e-5


def dropped(front: str) -> tuple[list[str], bool, str]:
    """Discard two steps without copies. Return the warnings, whether residuals were zero, and an error after close."""
    training = Training(front, "EFSignSGD", "alltoall", None)
    training.backward(0)
    training.attachment.discard_step()  # without compression, so it has left nothing
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in (1, 2):
            training.backward(number)
            training.attachment.discard_step()
    is_empty = not any(values.any() for values in training.residuals().values())
    training.attachment.close()
    with pytest.raises(RuntimeError) as raised:
        training.attachment.discard_step()
    return [str(each.message) for each in caught if "gckernels" in str(each.message)], is_empty, str(raised.value)


@pytest.mark.parametrize("front", FRONTS)
def test_without_copies_residuals_are_dropped_and_that_is_said_once(front):
    for texts, is_empty, error in values_of(run_ranks(2, dropped, front)):
        assert len(texts) == 1 and "can_discard=True" in texts[0]
        assert is_empty and error == "discard_step: the attachment is closed"


# -------------------------------------------------------------------- gradients that are thrown away

QUIET = ("used", "no_sync", "frozen", "exact", "discarded", "accumulated", "by hand", "LBFGS", "scaled")
LOUD = ("cleared", "zeroed")


def warnings_in(front: str, pattern: str) -> int:
    """The number of warnings of unused gradients in a training in which two networks share losses."""
    module: Any = build("Mlp")
    model, attachment = attached(front, module, "EFSignSGD", can_discard=True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    if pattern == "LBFGS":
        optimizer = torch.optim.LBFGS(module.parameters(), lr=0.01, max_iter=3, tolerance_change=-1)
    scaler = torch.amp.GradScaler(torch.get_default_device().type, enabled=pattern == "scaled")
    apart = model.no_sync if front == "attach" else attachment.no_sync
    other = torch.nn.Parameter(torch.ones(()))  # the other network's

    def loss(number: int) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=pattern != "zeroed")
        value = scaler.scale(model(module.batch(number, dist.get_rank())))
        value.backward()
        return value

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(4):
            if pattern == "LBFGS":
                optimizer.step(lambda number=number: loss(number))
                continue
            loss(number)
            if pattern == "accumulated":
                model(module.batch(number, dist.get_rank())).backward()
            if pattern == "by hand":
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter -= 0.01 * parameter.grad
            else:
                scaler.step(optimizer)
                scaler.update()
            if pattern in ("used", "accumulated", "LBFGS"):
                continue
            optimizer.zero_grad(set_to_none=pattern != "zeroed")
            module.requires_grad_(pattern != "frozen")
            context = {"no_sync": apart, "exact": attachment.exact}.get(pattern, contextlib.nullcontext)
            with context():
                (other * model(module.batch(number + 10, dist.get_rank()))).backward()
            module.requires_grad_(True)
            if pattern == "discarded":
                attachment.discard_step()
    attachment.close()
    return sum("cleared before an optimizer used them" in str(each.message) for each in caught)


def left(front: str) -> int:
    """The number of hooks of optimizers that a synchronised model leaves behind, which nobody has closed."""
    before = len(optimizers._global_optimizer_post_hooks)
    module: Any = build("Mlp")
    model = DistributedDataParallel(module) if front == "attach" else module
    sync.attach(model, "EFSignSGD")
    model(module.batch(0, dist.get_rank())).backward()
    assert len(optimizers._global_optimizer_post_hooks) > before
    del model, module
    gc.collect()
    return len(optimizers._global_optimizer_post_hooks) - before


@pytest.mark.parametrize("front", FRONTS)
def test_nothing_is_left_of_a_model_that_is_gone(front):
    assert values_of(run_ranks(2, left, front)) == [0, 0]


def warned(front: str) -> dict[str, int]:
    return {pattern: warnings_in(front, pattern) for pattern in (*QUIET, *LOUD)}


@pytest.mark.host_only("the host does not read gradients of a device")
@pytest.mark.parametrize("front", ["attach", pytest.param("module", marks=pytest.mark.slow)])
def test_gradients_that_no_optimizer_used_are_warned_of_once(front):
    for found in values_of(run_ranks(2, warned, front)):
        assert found == dict.fromkeys(QUIET, 0) | dict.fromkeys(LOUD, 1)
