"""The simulated device itself: it has the races that a real one has, and no others."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from harness.simulated_device import build
from harness.simulated_device.launch_order import first_difference
from ranks import Device, ranks_on, run_ranks, values_of

pytestmark = pytest.mark.skipif(build.reason_against() is not None, reason=str(build.reason_against()))

SIM, LATE = Device("sim"), [Device("sim", seed) for seed in range(3)]
NUMEL = 1 << 16


def outcome_of(function: Callable[..., object], device: Device, ranks: int = 1):
    with ranks_on(device):
        return run_ranks(ranks, function)


# -------------------------------------------------------------------- order of work


def _other() -> torch.Stream:
    return torch.get_device_module("sim").Stream()


def _current() -> torch.Stream:
    return torch.accelerator.current_stream()


def without_order() -> float:
    values = torch.zeros(NUMEL)
    with _other():
        values.add_(1)
    return float(values.sum())


def behind_an_event() -> float:
    values, other = torch.zeros(NUMEL), _other()
    other.wait_event(_current().record_event())
    with other:
        values.add_(1)
    _current().wait_event(other.record_event())
    return float(values.sum())


def behind_a_stream() -> float:
    values, other = torch.zeros(NUMEL), _other()
    other.wait_stream(_current())
    with other:
        values.add_(1)
    _current().wait_stream(other)
    return float(values.sum())


def behind_the_host() -> float:
    values, other = torch.zeros(NUMEL), _other()
    torch.accelerator.synchronize()
    with other:
        values.add_(1)
    other.synchronize()
    return float(values.sum())


def two_readers() -> float:
    values, other = torch.ones(NUMEL), _other()
    other.wait_stream(_current())
    with other:
        torch.add(values, 1)
    return float(values.sum())


def read_too_early() -> float:
    values, other = torch.ones(NUMEL), _other()
    other.wait_stream(_current())
    with other:
        values.mul_(1)
    return float(values.sum())  # as if it were over


def overwritten_too_early() -> float:
    values, other, total = torch.ones(NUMEL), _other(), torch.zeros(NUMEL)
    other.wait_stream(_current())
    with other:
        total.copy_(values)
    values.zero_()
    _current().wait_stream(other)
    return float(total.sum())


def freed_too_early() -> float:
    values, other, total = torch.ones(NUMEL), _other(), torch.zeros(NUMEL)
    other.wait_stream(_current())
    with other:
        total.copy_(values)
    del values
    torch.zeros(NUMEL)  # in the same memory
    _current().wait_stream(other)
    return float(total.sum())


def recorded() -> float:
    values, other, total = torch.ones(NUMEL), _other(), torch.zeros(NUMEL)
    other.wait_stream(_current())
    with other:
        total.copy_(values)
        values.record_stream(_current())
    del values
    torch.zeros(NUMEL)
    _current().wait_stream(other)
    return float(total.sum())


def a_future_without_tensors() -> float:
    return _by_future(lambda values: None)


def a_future_of_the_tensor() -> float:
    return _by_future(lambda values: values)


def _by_future(value: Callable[[torch.Tensor], object]) -> float:
    values, other = torch.zeros(NUMEL), _other()
    other.wait_stream(_current())
    future: torch.futures.Future = torch.futures.Future(devices=[values.device])
    with other:
        values.add_(1)
        future.set_result(value(values))
    future.wait()
    return float(values.sum())


GOOD = [behind_an_event, behind_a_stream, behind_the_host, recorded, a_future_of_the_tensor]
BAD = [without_order, overwritten_too_early, freed_too_early, a_future_without_tensors]


@pytest.mark.parametrize("function", [*GOOD, two_readers])
def test_ordered_accesses_are_no_races(function):
    assert values_of(outcome_of(function, SIM)) == [NUMEL]


@pytest.mark.parametrize("function", [*BAD, read_too_early])
def test_accesses_without_order_are_races(function):
    (outcome,) = outcome_of(function, SIM)
    assert outcome.error_type == "Races" and "without order behind the" in outcome.error_text


def on_many_delays(function: Callable[[], float], tries: int) -> set[float]:
    """Returns the results of a function, called until it returns a wrong number or `tries` times."""
    from harness import simulated_device

    found: set[float] = set()
    while tries and found <= {NUMEL}:
        found.add(function())
        tries -= 1
    simulated_device.end_of_call()  # the wrong numbers are what counts
    return found


def results_if_late(function: Callable[[], float], tries: int) -> set[float]:
    with ranks_on(LATE[0]):
        (found,) = values_of(run_ranks(1, on_many_delays, function, tries))
    return found


# Delays of which three in eight show a race hide it 8 times in a row in 2 of 100 runs, and never 100 times.
@pytest.mark.parametrize("function", BAD)
def test_a_race_is_a_wrong_number_if_work_is_late(function):
    assert results_if_late(function, 100) != {NUMEL}


@pytest.mark.parametrize("function", GOOD)
def test_without_races_late_work_has_the_right_numbers(function):
    assert results_if_late(function, 8) == {NUMEL}


# -------------------------------------------------------------------- memory of the host


def pinned_read_too_early() -> float:
    values = torch.ones(NUMEL)
    there = torch.zeros(NUMEL, device="cpu", pin_memory=True)
    there.copy_(values, non_blocking=True)
    return float(there.sum())


def pinned_read_behind_an_event() -> float:
    values = torch.ones(NUMEL)
    there = torch.zeros(NUMEL, device="cpu", pin_memory=True)
    there.copy_(values, non_blocking=True)
    _current().record_event().synchronize()
    return float(there.sum())


def pinned_overwritten_too_early() -> float:
    here = torch.ones(NUMEL, device="cpu", pin_memory=True)
    values = here.to("sim", non_blocking=True)
    here.zero_()
    return float(values.sum())


def pageable() -> float:
    here = torch.ones(NUMEL, device="cpu")
    values = here.to("sim", non_blocking=True)
    here.zero_()
    return float(values.sum())


@pytest.mark.parametrize("function", [pinned_read_behind_an_event, pageable])
def test_copies_that_are_awaited(function):
    assert values_of(outcome_of(function, SIM)) == [NUMEL]
    assert results_if_late(function, 8) == {NUMEL}


def test_what_the_host_reads_too_early_is_not_there():
    (found,) = values_of(outcome_of(pinned_read_too_early, SIM))
    assert math.isnan(found)


def test_what_the_host_writes_too_early_is_a_race():
    (outcome,) = outcome_of(pinned_overwritten_too_early, SIM)
    assert outcome.error_type == "Races" and "write by the host" in outcome.error_text


@pytest.mark.parametrize("function", [pinned_read_too_early, pinned_overwritten_too_early])
def test_copies_that_are_not_awaited(function):
    assert results_if_late(function, 100) != {NUMEL}


# -------------------------------------------------------------------- the device


def described() -> list[object]:
    module = torch.get_device_module("sim")
    before = module.memory_allocated()
    kept = torch.empty(1000)
    grown = module.memory_allocated() - before
    first, second = (torch.Event("sim", enable_timing=True) for _ in range(2))
    first.record()
    second.record()
    elapsed_ms = first.elapsed_time(second)
    other = torch.zeros(3, device="sim:1")
    with pytest.raises(RuntimeError, match="no graphs"):
        module.graph()
    return [grown, elapsed_ms >= 0, str(other.device), bool(torch.isnan(kept).all())]


def test_it_is_a_device_like_others():
    assert values_of(outcome_of(described, SIM)) == [[4096, True, "sim:1", True]]


# -------------------------------------------------------------------- collectives


def sums() -> tuple[float, str]:
    values = torch.full((NUMEL,), float(dist.get_rank() + 1))
    work = dist.all_reduce(values, async_op=True)
    assert work is not None
    work.wait()
    return float(values[0]), dist.get_backend()


def not_awaited() -> float:
    values = torch.ones(NUMEL)
    work = dist.all_reduce(values, async_op=True)
    found = float(values.sum())
    assert work is not None
    return found


def other_sizes() -> None:
    dist.all_reduce(torch.ones(10 + dist.get_rank()))


def other_collectives() -> None:
    values = torch.ones(10)
    dist.all_reduce(values) if dist.get_rank() else dist.broadcast(values, 0)


@pytest.mark.parametrize("device", [SIM, LATE[1]])
def test_collectives_are_ordered_by_their_works(device):
    assert values_of(outcome_of(sums, device, 2)) == [(3.0, "simccl")] * 2


def test_a_result_that_nobody_has_awaited_is_a_race():
    assert {outcome.error_type for outcome in outcome_of(not_awaited, SIM, 2)} == {"Races"}


@pytest.mark.parametrize("function", [other_sizes, other_collectives])
def test_other_collectives_are_named(function):
    for outcome in outcome_of(function, SIM, 2):
        assert outcome.error_type == "RuntimeError" and "others do not" in outcome.error_text


@pytest.mark.parametrize(
    ("orders", "fits"),
    [
        ([["a", "b", "a"], ["a", "b", "a"]], True),
        ([["a", "b"], ["b", "a"]], False),
        ([["a", "c"], ["a", "b"], ["c", "b"]], True),  # three pairs of ranks
        ([["a", "c"], ["b", "a"], ["c", "b"]], False),
        ([[], []], True),
    ],
)
def test_orders_of_communicators(orders, fits):
    assert (first_difference(orders) == "") == fits
