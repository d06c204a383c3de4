"""Rules of the accuracy guard, finer plans, and traces that remember."""

from __future__ import annotations

import math

import pytest
import torch

from gckernels import DGC, QSGD, BlockQuant, EFSignSGD, Identity, PowerSGD, SigNUM
from gckernels.ops import Cast16
from gckernels.sync.accuracy.accuracy import ROUNDING, allowed_compressors
from gckernels.sync.plans.plan import Plan
from gckernels.sync.plans.units import UnitPlan
from gckernels.sync.programs.named import ALLGATHER, ALLREDUCE, ALLTOALL, ENCODED_ALLREDUCE, POWERSGD
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import Role, TracedTensor
from gckernels.sync.tuning.watching.fallback import errors_of, finer
from gckernels.sync.tuning.watching.guard import PATIENCE, Fault, Guard, Reading

FOUR, EIGHT, SIGN = BlockQuant(bits=4), BlockQuant(), EFSignSGD()
ERRORS = {str(FOUR): 0.13, str(EIGHT): 0.01, str(SIGN): 0.65, str(Cast16()): 0.001}


def tensor(name: str, role: Role = Role.WEIGHT, **errors: float) -> TracedTensor:
    return TracedTensor(name, 4096, 0.0, (64, 64), role=role, errors=ERRORS | errors)


TRACE = ModelTrace("model", (tensor("a"), tensor("b"), tensor("table", Role.EMBEDDING)), 0.1)


def unit(name: str, method: object, program: object = ALLGATHER, **more: object) -> UnitPlan:
    return UnitPlan(name, 4096, method, program, method.traits.needs_feedback, **more)


PLAN = Plan((unit("a", FOUR), unit("b", FOUR), unit("table", Identity(), ALLREDUCE)))


def faults_of(guard: Guard, windows: list[dict[str, Reading]]) -> list[tuple[Fault, ...]]:
    found = []
    for readings in windows:
        guard, faults = guard.after(readings)
        found.append(faults)
    return found


def test_every_compressed_unit_is_watched():
    plan = Plan((unit("a", PowerSGD(), POWERSGD), unit("b", Cast16(), ENCODED_ALLREDUCE), PLAN.units[2]))
    guard = Guard.of(plan, "aggressive", TRACE)
    assert guard.keys == ("a", "b") and guard.low_rank == ("a",)
    assert guard.after({"b": Reading(0.1, 0.1)})[0].low_rank == ("a",)


def test_without_feedback_only_a_limit_is_watched():
    """Unbiased compressors may have larger errors than 1, if the user has named them."""
    plan = Plan((unit("a", FOUR), unit("b", QSGD())))
    assert Guard.of(plan, "safe", TRACE).keys == ("a", "b")
    assert Guard.of(plan, [FOUR, QSGD()], TRACE).keys == ("a",)
    found = faults_of(Guard.of(plan, "safe", TRACE), [{"b": Reading(0.3, 0.3)}] * PATIENCE)
    assert found[-1] == (Fault("b", 0.3, 0.2, 0.3, grows=False),)


def test_momenta_are_watched_and_votes_are_not():
    """A vote says nothing of magnitudes, so no error separates a good one from a bad one."""
    dgc, vote = DGC(), SigNUM()
    plan = Plan((unit("a", dgc), unit("b", vote)))
    guard = Guard.of(plan, [dgc, vote], TRACE)
    assert guard.keys == ("a",)
    assert set(faults_of(guard, [{"a": Reading(0.99, residual)} for residual in range(0, 200, 10)])) == {()}
    assert faults_of(guard, [{"a": Reading(math.inf, math.inf)}] * PATIENCE)[-1] != ()


def test_an_error_that_leaves_its_class_is_a_fault_of_its_unit():
    coarse, fine = Reading(0.3, 0.3), Reading(0.19, 0.2)
    found = faults_of(Guard.of(PLAN, "safe", TRACE), [{"a": fine, "b": coarse}] * PATIENCE)
    assert found[:-1] == [()] * (PATIENCE - 1)
    assert found[-1] == (Fault("b", 0.3, 0.2, 0.3, grows=False),)


def test_one_good_reading_ends_a_row_of_bad_ones_and_a_missing_one_does_not():
    coarse, fine = {"a": Reading(0.3, 0.3)}, {"a": Reading(0.1, 0.1)}
    assert set(faults_of(Guard.of(PLAN, "safe", TRACE), [coarse, coarse, fine] * 5)) == {()}
    assert faults_of(Guard.of(PLAN, "safe", TRACE), [coarse, {}, coarse, {}, coarse])[-1] != ()


@pytest.mark.parametrize(
    ("accuracy", "key", "limit"),
    [("safe", "a", 0.2), ("aggressive", "a", 0.9), ("aggressive", "table", 0.2), (0.5, "b", 0.5), ([FOUR], "a", 1.0)],
)
def test_limits_are_those_of_the_rule(accuracy, key, limit):
    plan = Plan((unit("a", FOUR), unit("b", FOUR), unit("table", FOUR)))
    assert Guard.of(plan, accuracy, TRACE).courses[key].limit == limit


def test_16_bit_floats_may_only_round():
    """Gradients that have become too small for fp16 are lost: nothing corrects the error."""
    plan = Plan((unit("a", Cast16(dtype=torch.float16), ENCODED_ALLREDUCE),))
    assert Guard.of(plan, "aggressive", TRACE).courses["a"].limit == ROUNDING
    assert set(faults_of(Guard.of(plan, "safe", TRACE), [{"a": Reading(0.001, 0.001)}] * 10)) == {()}
    assert faults_of(Guard.of(plan, "safe", TRACE), [{"a": Reading(0.01, 0.01)}] * PATIENCE)[-1] != ()


@pytest.mark.parametrize("accuracy", ["safe", "aggressive", [SIGN]])
def test_a_residual_that_holds_nan_is_a_fault(accuracy):
    plan = Plan((unit("a", SIGN),))
    found = faults_of(Guard.of(plan, accuracy, TRACE), [{"a": Reading(math.inf, math.inf)}] * PATIENCE)
    assert [fault.key for fault in found[-1]] == ["a"]


def test_a_residual_that_grows_beyond_its_bound_is_a_fault():
    """An error of 0.2 leaves at most a quarter of the gradient unsent."""
    guard = Guard.of(PLAN, "safe", TRACE)
    (fault,) = faults_of(guard, [{"a": Reading(0.15, residual)} for residual in (0.6, 1.2, 2.4)])[-1]
    assert fault.grows and fault.key == "a"
    assert set(faults_of(guard, [{"a": Reading(0.15, residual)} for residual in (0.1, 0.2, 0.3, 0.4)])) == {()}
    assert set(faults_of(guard, [{"a": Reading(0.15, 2.0)}] * 10)) == {()}, "large, but it does not grow"


@pytest.mark.parametrize("error", [0.65, 0.9, 0.97])
def test_the_residual_of_the_largest_steady_error_is_no_fault(error):
    """A constant gradient is the worst case of a compressor: its residual tends to its bound from below."""
    residual, windows = 0.0, []
    for _ in range(30):
        for _ in range(10):
            residual = error * (1.0 + residual)
        windows.append({"a": Reading(error, residual)})
    assert set(faults_of(Guard.of(Plan((unit("a", SIGN),)), [SIGN], TRACE), windows)) == {()}


# -------------------------------------------------------------------- finer plans


def faulty(*keys: str, error: float = math.inf) -> list[Fault]:
    return [Fault(key, error, 0.2, 0.3, grows=False) for key in keys]


def test_a_unit_gets_the_next_finer_compressor_and_keeps_its_program():
    changed = finer(PLAN, faulty("b"), TRACE, "safe", 2)
    assert [each.compressor for each in changed.units] == [FOUR, EIGHT, Identity()]
    assert changed.units[1].program == ALLGATHER and changed.units[1].feedback
    assert changed.units[0] == PLAN.units[0]


def test_the_last_compressor_gives_way_to_none_at_all():
    plan = PLAN
    for _ in range(3):
        plan = finer(plan, faulty("a", "b"), TRACE, "safe", 2)
    assert [each.program for each in plan.units] == [ALLREDUCE] * 3
    assert not any(each.feedback for each in plan.units)


def test_a_coarser_compressor_is_never_chosen():
    plan = Plan((unit("a", EIGHT),))
    (changed,) = finer(plan, faulty("a"), TRACE, "aggressive", 2).units
    assert changed.compressor == Cast16()


def test_a_program_that_the_compressor_cannot_go_through_is_exchanged():
    plan = Plan((unit("a", EIGHT, ALLTOALL, message=3, channel=1),), channels=2)
    (changed,) = finer(plan, faulty("a"), TRACE, [EIGHT, Cast16()], 4).units
    assert changed.compressor == Cast16() and changed.program in (ALLTOALL, ENCODED_ALLREDUCE)
    (exact,) = finer(plan, faulty("a"), TRACE, [EIGHT], 4).units
    assert (exact.program, exact.message, exact.channel) == (ALLREDUCE, None, None)


def test_parts_and_merged_units_stay_as_they_are_cut():
    plan = Plan((unit("a", FOUR, also=("b",)), unit("table", FOUR)))
    changed = finer(plan, faulty("a+b"), TRACE, "safe", 2)
    assert changed.units[0].key == "a+b" and changed.units[0].compressor == EIGHT


def test_a_low_rank_method_is_followed_by_a_codec():
    matrix = PowerSGD().fit((64, 64))
    trace = ModelTrace("model", (tensor("a", **{str(PowerSGD()): 0.8}),), 0.1)
    (changed,) = finer(Plan((unit("a", matrix, ENCODED_ALLREDUCE),)), faulty("a"), trace, "aggressive", 2).units
    assert changed.compressor == SIGN and changed.program != ENCODED_ALLREDUCE


def test_a_compressor_whose_error_has_grown_is_followed_by_one_that_it_was_finer_than():
    """As one of low rank whose gradients were of low rank when they were recorded."""
    trace = ModelTrace("model", (tensor("table", Role.EMBEDDING, **{str(PowerSGD()): 0.001}),), 0.1)
    plan = Plan((unit("table", PowerSGD().fit((64, 64)), POWERSGD),))
    (changed,) = finer(plan, faulty("table", error=0.91), trace, "aggressive", 2).units
    assert changed.compressor == FOUR
    (exact,) = finer(plan, faulty("table"), trace, "aggressive", 2).units  # its residual holds inf
    assert exact.compressor == Identity()


def test_a_trace_remembers_faults_so_that_no_plan_repeats_them():
    faults = (Fault("b", 0.31, 0.2, 0.3, grows=False),)
    trace = TRACE.remembering(errors_of(PLAN, faults))
    allowed = allowed_compressors(trace, "safe")
    assert FOUR in allowed["a"] and FOUR not in allowed["b"] and EIGHT in allowed["b"]
    assert trace.tensors[0] == TRACE.tensors[0]
