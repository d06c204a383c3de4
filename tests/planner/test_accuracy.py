"""The rules of accuracy: which compressors each tensor may use, and the error of a plan."""

from __future__ import annotations

import csv
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import gckernels
from gckernels import sync
from gckernels.compressor import COMPRESSORS, Traits
from gckernels.ops import DGC, QSGD, BlockQuant, Cast16, EFSignSGD, Identity, PowerSGD, RandomK, SignSGD, TopK
from gckernels.sync.accuracy.accuracy import (
    AGGRESSIVE_ERROR,
    LOW_RANK_ERROR,
    SAFE_ERROR,
    allowed_compressors,
    candidates_by_default,
    error_on,
    is_safe,
    relative_error,
    start_step,
)
from gckernels.sync.accuracy.errors import assumed_error
from gckernels.sync.plans.plan import Plan, UnitPlan
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import Role, TracedTensor, TraceError

CONVERGENCE = Path(__file__).parents[2] / "bench" / "results" / "cpu" / "convergence.csv"


def tensor(name, shape=(64, 32), role=Role.WEIGHT, **more):
    return TracedTensor(name, math.prod(shape), 0.0, shape, role=role, **more)


def trace_of(*tensors):
    return ModelTrace("small", tensors, 0.0)


UNMEASURED = trace_of(
    tensor("weight"),
    tensor("bias", (64,), Role.VECTOR),
    tensor("embedding", role=Role.EMBEDDING),
    tensor("output", role=Role.OUTPUT),
    replace(tensor("double"), dtype=torch.float64),
    TracedTensor("published", 1 << 20, 0.0),
)


def names(methods):
    return {str(method).replace("bits=8, ", "").partition("(block")[0].partition("(d")[0] for method in methods}


def test_safe_is_precise_or_has_feedback():
    allowed = allowed_compressors(UNMEASURED)
    precise = {"Cast16", "BlockQuant", "BlockQuant(bits=4, block=256, scale_dtype=torch.float32)"}
    assert precise <= names(allowed["weight"]) == names(allowed["embedding"]) == names(allowed["output"])
    assert {method.name for method in allowed["weight"]} == {"Cast16", "BlockQuant", "BlockFP8", "LinearQuant"}
    assert allowed["bias"] == (Cast16(),), "a vector is sent exactly, unless its payload is added"
    assert allowed["double"] == ()
    assert allowed["published"] == allowed["weight"]


def test_exact_allows_nothing():
    assert (
        set(allowed_compressors(UNMEASURED, "exact").values())
        == {()}
        == set(allowed_compressors(UNMEASURED, 0).values())
    )


def test_aggressive_spares_embeddings_and_the_last_layer():
    safe, aggressive = (allowed_compressors(UNMEASURED, accuracy) for accuracy in ("safe", "aggressive"))
    more = set(aggressive["weight"]) - set(safe["weight"])
    assert {method.name for method in more} >= {"EFSignSGD", "OneBit", "PowerSGD"}
    assert all(method.traits.needs_feedback for method in more)
    assert all(aggressive[name] == safe[name] for name in ("bias", "embedding", "output", "double"))
    assert not any(isinstance(method, PowerSGD) for method in aggressive["published"]), "it needs a shape"
    assert {method.rows for method in aggressive["weight"] if isinstance(method, PowerSGD)} == {64}


@pytest.mark.parametrize("accuracy", ["safe", "aggressive", 1.0])
def test_what_changes_the_meaning_of_gradients_is_never_chosen(accuracy):
    chosen = {method.name for methods in allowed_compressors(UNMEASURED, accuracy).values() for method in methods}
    assert not chosen & {"DGC", "SigNUM", "SignSGD", "RandomK", "Identity"}


@pytest.mark.parametrize("limit", [0.0, 0.001, 0.005, 0.1, 0.15, 0.3, 0.7])
def test_no_allowed_compressor_exceeds_a_number(limit):
    allowed = allowed_compressors(UNMEASURED, limit)
    for each in UNMEASURED.tensors:
        assert all(error_on(each, method).value <= limit for method in allowed[each.name])
    assert (BlockQuant() in allowed["weight"]) == (limit >= 0.1)
    assert (BlockQuant(bits=4) in allowed["embedding"]) == (limit > SAFE_ERROR)
    assert (EFSignSGD() in allowed["weight"]) == (limit == 0.7)
    assert EFSignSGD() not in allowed["output"]


def test_a_list_is_allowed_whatever_its_errors_are():
    allowed = allowed_compressors(UNMEASURED, [DGC(), "RandomK", "PowerSGD(rank=2)", "Identity", DGC()])
    assert allowed["weight"] == allowed["output"] == (DGC(), RandomK(), PowerSGD(rank=2, rows=64))
    assert allowed["bias"] == (RandomK(),)
    assert allowed["published"] == (DGC(), RandomK())


def test_measured_errors_decide():
    errors = {str(TopK()): 0.1, "EFSignSGD": 0.95, "BlockQuant": 0.3, "QSGD": 0.1, "Cast16": 0.02, "NotHere": 0.0}
    measured = tensor("weight", errors=errors)
    trace = trace_of(measured, tensor("other"))
    safe, aggressive = (allowed_compressors(trace, accuracy) for accuracy in ("safe", "aggressive"))
    assert set(safe["weight"]) == {TopK(), QSGD()}, "QSGD is unbiased; Cast16 is neither that nor precise here"
    assert set(aggressive["weight"]) == {TopK(), QSGD(), BlockQuant()}
    assert set(safe["other"]) == {BlockQuant(), Cast16()}, "assumed errors, of the measured compressors only"
    assert error_on(measured, EFSignSGD()).value == 0.95 and not error_on(measured, EFSignSGD()).assumed
    assert error_on(measured, EFSignSGD(block=256)).assumed


@dataclass(frozen=True)
class Half(BlockQuant):
    """A compressor of a user, whose traits alone decide."""

    traits = Traits(needs_feedback=True)


def test_a_users_compressor_is_judged_by_the_same_rule(monkeypatch):
    monkeypatch.setitem(COMPRESSORS, "Half", Half)
    trace = trace_of(tensor("good", errors={"Half": 0.19}), tensor("bad", errors={"Half": 0.21}))
    allowed = allowed_compressors(trace)
    assert allowed == {"good": (Half(),), "bad": ()}
    monkeypatch.setattr(Half, "traits", Traits(needs_feedback=True, applies_momentum=True))
    assert allowed_compressors(trace) == {"good": (), "bad": ()}


def test_assumed_errors_are_those_that_are_measured_directly():
    torch.manual_seed(1)
    laplace = torch.distributions.Laplace(0.0, 1.0).sample((1 << 16,))
    decoded = gckernels.decode(BlockQuant(), gckernels.encode(BlockQuant(), laplace), laplace.numel())
    direct = ((decoded - laplace).norm() / laplace.norm()).item()
    assert direct / 2 < assumed_error(BlockQuant()) < direct * 2
    values = {method.name: assumed_error(method) for method in candidates_by_default()}
    assert all(0 < value < 2 for value in values.values()) and assumed_error(Identity()) == 0
    assert assumed_error(SignSGD()) is not None


@pytest.mark.parametrize("wrong", ["quick", -0.1, 1.5, math.nan, True, None, {"TopK": 1}, ["Nothing"], [3], b"safe"])
def test_wrong_rules_are_refused(wrong):
    with pytest.raises((TypeError, ValueError), match="accuracy"):
        allowed_compressors(UNMEASURED, wrong)


def test_aggressive_training_begins_exactly():
    assert [start_step(accuracy, 1005) for accuracy in ("exact", "safe", 0.2, [BlockQuant()])] == [0] * 4
    assert [start_step(accuracy, 1005) for accuracy in ("aggressive", 0.5, ["TopK"])] == [101] * 3
    assert start_step(["TopK"]) == start_step("safe") == 0
    with pytest.raises(ValueError, match="steps="):
        start_step("aggressive")
    for wrong in (0, -1, 2.0, True):
        with pytest.raises(ValueError, match="steps must be"):
            start_step("safe", wrong)


# -------------------------------------------------------------------- errors of plans

NORMED = trace_of(
    tensor("a", norm=3.0, errors={"BlockQuant": 0.1, str(PowerSGD(rank=2)): 0.5}),
    tensor("b", norm=4.0, errors={"BlockQuant": 0.2}),
    tensor("bias", (64,), Role.VECTOR, norm=0.0),
)


def unit(name, method, numel=64 * 32, **more):
    return UnitPlan(name, numel, method, sync.programs.ALLGATHER, True, **more)


def test_the_error_of_a_plan_is_weighted_by_norms():
    bias = unit("bias", Identity(), 64)
    assert relative_error(Plan((unit("a", Identity()), unit("b", Identity()), bias)), NORMED) == 0
    both = Plan((unit("a", BlockQuant()), unit("b", BlockQuant()), bias))
    expected = math.sqrt((9 * 0.1**2 + 16 * 0.2**2) / 25)
    assert relative_error(both, NORMED) == pytest.approx(expected)
    low_rank = Plan((unit("a", PowerSGD(rank=2).fit((64, 32))), unit("b", Identity()), bias))
    assert relative_error(low_rank, NORMED) == pytest.approx(math.sqrt(9 * 0.25 / 25))


def test_parts_and_merged_tensors_count_by_their_size():
    half = Plan((unit("a", BlockQuant(), 1024, start=0), unit("a", Identity(), 1024, start=1024)))
    assert relative_error(half, NORMED) == pytest.approx(math.sqrt(4.5 * 0.1**2 / 25))
    merged = Plan((unit("a", BlockQuant(), 4096, also=("b",)),))
    assert relative_error(merged, NORMED) == pytest.approx(math.sqrt((9 * 0.1**2 + 16 * 0.2**2) / 25))


def test_without_norms_all_elements_weigh_alike():
    plan = Plan((unit("weight", BlockQuant(bits=4)),))
    trace = trace_of(tensor("weight"), tensor("other"))
    assert relative_error(plan, trace) == pytest.approx(assumed_error(BlockQuant(bits=4)) / math.sqrt(2))


def test_a_plan_of_another_model_is_refused():
    with pytest.raises(TraceError, match="other: in the plan, but not in the trace of small"):
        relative_error(Plan((unit("other", BlockQuant()),)), NORMED)


# -------------------------------------------------------------------- the rule against trainings


def losses(compressor):
    """For every model, how much accuracy was lost against plain DDP, as a mean over seeds, in units of the standard
    deviation that plain DDP has between seeds."""
    rows = list(csv.DictReader(CONVERGENCE.open()))
    by_run = {(row["model"], row["compressor"], row["seed"]): float(row["accuracy"]) for row in rows}
    found = {}
    for model in sorted({row["model"] for row in rows if row["compressor"] == compressor}):
        seeds = [seed for name, method, seed in by_run if (name, method) == (model, "none")]
        plain = [by_run[model, "none", seed] for seed in seeds]
        lost = [before - by_run[model, compressor, seed] for before, seed in zip(plain, seeds, strict=True)]
        found[model] = statistics.mean(lost) / statistics.stdev(plain)
    return found


TRAINED = sorted({row["compressor"] for row in csv.DictReader(CONVERGENCE.open())} - {"none", "Identity"})


def test_what_is_safe_lost_nothing_in_training():
    """No more than plain DDP differs between seeds, in any model."""
    safe = [name for name in TRAINED if is_safe(gckernels.from_spec(name))]
    assert set(safe) >= {"Cast16", "BlockQuant", "BlockFP8", "LinearQuant"}
    for name in safe:
        assert max(losses(name).values()) < 1, name


def test_what_is_only_aggressive_did_lose():
    """Otherwise the rule would be too strict."""
    for method in candidates_by_default():
        if method.name in TRAINED and not is_safe(method) and method.traits.needs_feedback:
            assert max(losses(method.name).values()) > 2, method
    assert error_on(tensor("weight"), EFSignSGD()).value < AGGRESSIVE_ERROR


def test_an_aggressive_rule_allows_low_rank_methods_larger_errors():
    errors = dict.fromkeys(map(str, (EFSignSGD(), PowerSGD())), (AGGRESSIVE_ERROR + LOW_RANK_ERROR) / 2)
    trace = trace_of(
        tensor("weight", errors=errors),
        tensor("output", role=Role.OUTPUT, errors=errors),
        tensor("worse", errors=dict.fromkeys(errors, 0.97)),
    )
    allowed = allowed_compressors(trace, "aggressive")
    assert {name: {each.name for each in methods} for name, methods in allowed.items()} == {
        "weight": {"PowerSGD"},
        "output": set(),
        "worse": set(),
    }
    assert not any(allowed_compressors(trace, AGGRESSIVE_ERROR).values())  # a number holds for all of them


def test_low_rank_methods_lose_no_more_than_signs_in_training():
    """Although their errors are larger: with fewer losses for smaller ones, their limit would have no reason."""
    signs, low_rank = losses("EFSignSGD"), losses("PowerSGD")
    assert low_rank.keys() == signs.keys()
    assert sum(low_rank[model] <= signs[model] for model in signs) > len(signs) / 2
    assert max(low_rank.values()) <= max(signs.values())
