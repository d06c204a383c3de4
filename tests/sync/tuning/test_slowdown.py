"""In front of an optimizer that normalises gradients, an aggressive rule allows less, and errors count as time."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch

import tunings
from gckernels import BlockQuant, ChunkTopK, EFSignSGD, PowerSGD, sync
from gckernels.sync.accuracy.accuracy import Accuracy, as_accuracy, relative_error
from gckernels.sync.accuracy.slowdown import LARGEST_ERROR, restrained, slowdown
from gckernels.sync.frontends.checks.optimizer_checks import normalises
from gckernels.sync.traces.model_parameters import unmeasured
from gckernels.sync.tuning.optimizers import Kind, Optimizers
from gckernels.sync.tuning.trials import spans
from gckernels.sync.tuning.trials.race import Race
from gckernels.sync.tuning.trials.rules import STEPS, stages_of
from gckernels.sync.tuning.trials.trial_report import outcome
from ranks import run_ranks, values_of


def test_errors_cost_steps():
    """0.12 is the error of 4 bits, 0.65 of signs, 0.87 of sparse values."""
    found = [slowdown(error) for error in (0.0, 0.12, 0.4, 0.65, 0.87)]
    assert found == pytest.approx([1.0, 1.01, 1.12, 1.34, 1.70], abs=0.005)


def test_a_rule_allows_less_and_a_list_stays():
    assert restrained(as_accuracy("aggressive")) == Accuracy(LARGEST_ERROR, LARGEST_ERROR)
    assert restrained(as_accuracy(0.3)) == as_accuracy(0.3)
    for accuracy in ("exact", "safe", ["EFSignSGD", "BlockQuant"]):
        assert restrained(as_accuracy(accuracy)) == as_accuracy(accuracy)


@pytest.mark.parametrize("kind", [each for each in vars(torch.optim).values() if isinstance(each, type)])
def test_all_optimizers_but_those_of_the_class_of_sgd_normalise(kind: Any):
    if not issubclass(kind, torch.optim.Optimizer) or kind is torch.optim.Optimizer:
        return
    optimizer = kind([torch.nn.Parameter(torch.ones(4, 4))], lr=0.1)
    assert normalises(optimizer) != (kind in (torch.optim.SGD, torch.optim.ASGD, torch.optim.LBFGS))


@pytest.mark.parametrize(
    ("name", "expected"), [("FusedSGD", False), ("SGDW", False), ("SignSGD", True), ("Lion", True), ("MyAdam", True)]
)
def test_optimizers_of_others_are_known_by_name(name: str, expected: bool):
    kind = type(name, (torch.optim.Optimizer,), {})
    assert normalises(kind([torch.nn.Parameter(torch.ones(1))], {"lr": 0.1})) == expected


# -------------------------------------------------------------------- the optimizers of a training


class OneRank:
    """The ranks of a job of one."""

    def slowest(self, values: Any) -> list[float]:
        return [float(each) for each in values]


def step(kind: type[torch.optim.Optimizer], *parameters: torch.nn.Parameter) -> None:
    for each in parameters:
        each.grad = torch.ones_like(each)
    kind(parameters, lr=0.1).step()  # type: ignore[call-arg]


def test_optimizers_are_seen_at_their_first_step():
    one, other, stranger = (torch.nn.Parameter(torch.ones(8, 8)) for _ in range(3))
    frozen = torch.nn.Parameter(torch.ones(8, 8), requires_grad=False)
    (stage,) = stages_of("aggressive", 100)

    def watch() -> Optimizers:
        return Optimizers([one, other, frozen], OneRank())  # type: ignore[arg-type]

    seen = watch()
    step(torch.optim.AdamW, stranger)
    assert seen.kind() is Kind.UNKNOWN
    step(torch.optim.SGD, one)
    assert seen.kind() is Kind.UNKNOWN, "nobody knows who steps the other one"
    (note,) = seen.rule(stage).notes
    assert "errors up to 0.4 where no optimizer of torch has stepped all parameters" in note
    step(torch.optim.SGD, other)
    assert seen.kind() is Kind.PROPORTIONAL and seen.rule(stage) is stage
    for kind in (torch.optim.AdamW, torch.optim.Muon, torch.optim.RMSprop):
        seen = watch()
        step(torch.optim.SGD, one)
        step(kind, other)
        rule = seen.rule(stage)
        assert seen.kind() is Kind.NORMALISING and rule.slows and rule.accuracy == restrained(stage.accuracy)
        (note,) = rule.notes
        assert f"in front of {kind.__name__}" in note and "for the updates behind it (sync.Updates)" in note
        assert (rule.name, rule.allowed != stage.allowed) == ("aggressive", True)
        assert BlockQuant(bits=4) in rule.methods and not {EFSignSGD(), ChunkTopK(), PowerSGD()} & {*rule.methods}
        for unchanged in (*stages_of("safe"), *stages_of(["EFSignSGD"])):
            assert seen.rule(unchanged) is unchanged
    seen.close()


# -------------------------------------------------------------------- races


LAYER = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False))
TRACE = unmeasured(LAYER, dict(LAYER.named_parameters()))
PLAIN, FOUR, SIGNS = (
    sync.uniform_plan(LAYER, spec, world_size=2) for spec in ("Identity", "BlockQuant(bits=4)", "EFSignSGD")
)


@pytest.mark.parametrize(
    ("four_s", "signs_s", "slows", "winner"),
    [
        (0.109, 0.090, False, SIGNS),
        (0.109, 0.090, True, FOUR),  # 0.110 against 0.12: what a byte transformer was seen to lose by
        (0.109, 0.060, True, SIGNS),
    ],
)
def test_races_compare_times_to_a_loss(four_s: float, signs_s: float, slows: bool, winner: sync.Plan):
    (stage,) = stages_of("aggressive", 100)
    stage = type(stage)(stage.name, stage.accuracy, 0, slows, ("coarse ones are for updates",))
    race, plans = Race(None, None, PLAIN), {FOUR: "four", SIGNS: "signs"}  # type: ignore[arg-type]
    slowdowns = [stage.slowdown(plan, TRACE) for plan in plans]
    assert slowdowns == [math.exp(0.7 * relative_error(plan, TRACE) ** 2) if slows else 1.0 for plan in plans]
    race.join(plans, slowdowns)
    race.sent_nbytes = dict.fromkeys(range(3), 1.0)
    tunings.played(race, (0.450, four_s, signs_s))
    assert race.winner is winner
    decision = outcome(60, TRACE, race, (stage,), 2, sync.Frontend.DDP)
    assert decision.measured_s == pytest.approx(four_s if winner is FOUR else signs_s)
    assert decision.text.endswith("; coarse ones are for updates")


# -------------------------------------------------------------------- models of plain parameters


class PlainModel(torch.nn.Module):
    """Matrices of no class of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(64, 64))
        self.blocks = torch.nn.ParameterList(torch.randn(64, 64) for _ in range(4))
        self.head = torch.nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for matrix in (self.table, *self.blocks, self.head):
            x = (x @ matrix).relu() / 8
        return x.square().mean()


class Clock(tunings.ScriptedClock):
    """A clock by which plans with signs are fastest, and then those with blocks."""

    def mark(self) -> float:
        names = {unit.compressor.name for unit in self.handle().plan.units} if self.handle() else set()
        coded = names - {"Identity"}
        self.now_s += 0.2 if "EFSignSGD" in coded else 0.25 if coded == {"BlockQuant"} else 0.5 if coded else 1.0
        return self.now_s


def tuned(front: str, optimizer: str | None) -> tuple[list[str], list[str]]:
    """The compressors of the matrices of a tuned model, from the last layer to the first, and all decisions."""
    torch.manual_seed(0)
    module, handles = PlainModel(), []
    clock = Clock(lambda: handles[0] if handles else None, {})
    with mock.patch.object(spans, "clock_of", lambda device: clock):
        model, handle = tunings.tuned_handle(front, module, accuracy="aggressive", steps=10)
        handles.append(handle)
        stepper = None if optimizer is None else getattr(torch.optim, optimizer)(module.parameters(), lr=0.01)
        for number in range(STEPS + 60):
            module.zero_grad()
            model(torch.randn(4, 64, generator=torch.Generator().manual_seed(number))).backward()
            if stepper is not None:
                stepper.step()
    found = {unit.parameters[0]: unit.compressor.name for unit in handle.plan.units}
    texts = [decision.text for decision in handle.decisions]
    handle.close()
    return [found[name] for name in ("head", "blocks.2", "blocks.1", "table")], texts


def all_tuned() -> dict[str, Any]:
    fronts = {"SGD": "module", "Muon": "ddp", None: "module"}
    return {str(name): tuned(front, name) for name, front in fronts.items()}


def test_signs_are_for_sgd_and_spare_first_and_last_matrices():
    for found in values_of(run_ranks(2, all_tuned)):
        names, texts = found["SGD"]
        assert names == ["BlockQuant", "EFSignSGD", "EFSignSGD", "BlockQuant"]
        assert "no class of torch.nn says what blocks.3, head, table are for" in texts[-1]
        for optimizer, text in (("Muon", "in front of Muon"), ("None", "no optimizer of torch")):
            names, texts = found[optimizer]
            assert names == ["BlockQuant"] * 4, optimizer
            assert text in texts[-1] and "sync.Updates" in texts[-1], texts[-1]
