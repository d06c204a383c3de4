"""Windows of steps on real ranks, the readings in them, and the rate of a link."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist

from gckernels import decode, encode, from_spec, sync
from gckernels.sync.planner.machines.scaling import sending_bit_per_s
from gckernels.sync.profiling.ranks import Ranks
from gckernels.sync.resources.readings import Piece, Readings, Watch
from gckernels.sync.tuning import known
from gckernels.sync.tuning.agreeing import Failure
from gckernels.sync.tuning.link import measured_bit_per_s, with_link
from gckernels.sync.tuning.measuring import Measured
from gckernels.sync.tuning.monitor import Monitor, Window
from planning import SimpleMachine
from ranks import run_ranks, values_of

CPU = torch.device("cpu")


def group() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def windows_of_a_rank() -> list[Window | None]:
    """Steps of 1 s on rank 0 and 2 s on rank 1, of which every fourth one is longer."""
    lengths = itertools.cycle([1.0 + dist.get_rank()] * 3 + [50.0])
    times = itertools.accumulate(lengths)
    monitor = Monitor(group(), CPU, window=8, clock=lambda: next(times))
    return [monitor.step_ended() for _ in range(24)]


def test_a_window_is_the_median_of_the_slowest_rank():
    for windows in values_of(run_ranks(2, windows_of_a_rank)):
        assert [at for at, window in enumerate(windows) if window is not None] == [7, 15, 23]
        assert {(window.steps, window.step_s) for window in windows if window is not None} == {(8, 2.0)}


def window_around_a_pause() -> Window | None:
    times = itertools.accumulate([1.0] * 4 + [100.0, 1.0])
    monitor = Monitor(group(), CPU, window=6, clock=lambda: next(times))
    windows = []
    for step in range(6):
        if step == 4:
            monitor.skip_pause()
        windows.append(monitor.step_ended())
    return windows[-1]


def test_a_pause_is_in_no_window():
    (window,) = values_of(run_ranks(1, window_around_a_pause))
    assert window.step_s == 1.0


# -------------------------------------------------------------------- readings

SIZES = {"first": (64, 96), "second": (33, 31), "bias": (50,)}


class Fixed(torch.nn.Module):
    """A model whose gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in SIZES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(size)))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum((gradients[name] * each).sum() for name, each in self.named_parameters())


def norms_of_a_rank(compressor: str, program: str | sync.Program | None) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The norms that were read in the third step, and those that follow from gradients and residuals."""
    torch.manual_seed(dist.get_rank())
    model = Fixed()
    synchronizer = sync.Synchronizer(model, sync.plan(model, compressor, program=program))
    runtime = synchronizer._runtime
    keys = [name for name in SIZES if name != "bias"]
    expected = torch.zeros(3, len(keys))
    for step in range(4):
        gradients = {name: torch.randn(size) for name, size in SIZES.items()}
        before = runtime.state_dict()["feedback"]["worker"]
        if step == 2:
            runtime.watch.ask()
        model(gradients).backward()
        after = runtime.state_dict()["feedback"]["worker"]
        if step == 2:
            for at, key in enumerate(keys):
                gradient = gradients[key].flatten()
                if before:
                    given, left = gradient + before[key], after[key]
                else:  # without feedback
                    coded = encode(from_spec(compressor), gradient)
                    given, left = gradient, gradient - decode(from_spec(compressor), coded, gradient.numel())
                expected[:, at] = torch.stack([each.norm() for each in (gradient, given, left)])
        model.zero_grad(set_to_none=False)
    readings = runtime.watch.take()
    is_over = runtime.watch.now is None and runtime.watch.take() is None
    synchronizer.close()
    return readings.norms(keys, CPU), expected, is_over


@pytest.mark.parametrize(
    ("compressor", "program"),
    [
        ("BlockQuant(bits=4)", "allgather"),
        ("BlockQuant(bits=4)", "alltoall"),
        ("Cast16", None),
        ("BlockQuant", "allgather"),
    ],
)
def test_readings_are_the_norms_of_one_step(compressor, program):
    for found, expected, is_over in values_of(run_ranks(2, norms_of_a_rank, compressor, program)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)  # the sums are in another order
        assert is_over, "the fourth step is not watched"


def test_a_ring_reads_the_residual_of_all_shards():
    for found, expected, _ in values_of(run_ranks(2, norms_of_a_rank, "BlockQuant(bits=4)", sync.ring(2))):
        torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=0)
        assert (found[1] > expected[1]).all(), "the gradients of both ranks are in the second half"


def norms_of_a_mean(compressor: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The norms of means that sketches give in some steps, and those of the means."""
    torch.manual_seed(7 + dist.get_rank())
    model = Fixed()
    synchronizer = sync.Synchronizer(model, sync.plan(model, compressor))
    watch, found = synchronizer._runtime.watch, []
    key, size = "first", SIZES["first"]
    for step in range(6):
        gradients = {name: torch.randn(each) for name, each in SIZES.items()}
        before = synchronizer.state_dict()["feedback"]["worker"].get(key, torch.zeros(size).flatten())
        watch.ask()
        model(gradients).backward()
        if step > 0:  # the first one is exact
            after, gradient = synchronizer.state_dict()["feedback"]["worker"][key], gradients[key].flatten()
            means = torch.stack((gradient, gradient + before, after))
            dist.all_reduce(means)
            sketches = watch.take().sketches([key, "second"], CPU)
            dist.all_reduce(sketches)
            found.append((sketches[0].norm(dim=1), means.norm(dim=1)))
        model.zero_grad(set_to_none=False)
    synchronizer.close()
    return found


@pytest.mark.parametrize("compressor", ["PowerSGD(rank=2)", "PowerSGD(rank=2, one_sided=True)"])
def test_low_rank_methods_are_read_by_the_mean_of_all_ranks(compressor):
    for steps in values_of(run_ranks(2, norms_of_a_mean, compressor)):
        assert len(steps) == 5
        for found, expected in steps:
            torch.testing.assert_close(found, expected, rtol=0.15, atol=0)  # a sketch has 4 % of noise


def window_of_means() -> Window | None:
    """Residuals that hold what the gradients of two ranks differ by, and a hundredth of their mean."""
    watch, times = Watch(), itertools.count()
    monitor = Monitor(group(), CPU, watch, ("a", "b"), ("a",), window=2, clock=lambda: float(next(times)))
    mean, apart = torch.arange(3000.0), (1 - 2 * dist.get_rank()) * torch.ones(3000)
    for _ in range(2):
        watch.begin_step(True)
        if watch.now is not None:
            watch.now.before("a", mean + 1e3 * apart, -1e3 * apart)
            watch.now.after("a", mean, 1e5 * apart + 0.01 * mean)
        window = monitor.step_ended()
    return window


def test_the_difference_of_ranks_is_no_error():
    for window in values_of(run_ranks(2, window_of_means)):
        assert window.readings.keys() == {"a"} and window.readings["a"].error == pytest.approx(0.01, rel=1e-2)
        assert window.error == window.readings["a"].error


def test_readings_of_nothing_are_zero():
    readings = Readings()
    assert torch.equal(readings.norms(["a", "b"], CPU), torch.zeros(3, 2))
    assert readings.norms([], CPU).shape == (3, 0)
    readings.around([Piece("a", torch.full((4,), 2.0), torch.zeros(4))], lambda: None)
    assert readings.norms(["b", "a"], CPU).tolist() == [[0.0, 4.0], [0.0, 4.0], [0.0, 0.0]]


def test_only_steps_that_compress_are_watched():
    watch = Watch()
    watch.ask()
    watch.begin_step(False)
    assert watch.now is None and watch.take() is None
    watch.begin_step(True)
    assert watch.now is not None
    watch.begin_step(True)
    assert watch.now is None and watch.take() is not None and watch.take() is None


def windows_with_readings(gradient: float, residual: float) -> list[tuple[float, dict[str, tuple[float, float]]]]:
    """One step in every window is watched. Rank 1 leaves ``residual`` of a gradient."""
    watch, times = Watch(), itertools.count()
    monitor = Monitor(group(), CPU, watch, ("a", "b"), window=4, clock=lambda: float(next(times)))
    windows = []
    for _ in range(8):
        watch.begin_step(True)
        if watch.now is not None:
            kept = torch.zeros(1)
            piece = Piece("a", torch.tensor([gradient]), kept)
            watch.now.around([piece], lambda kept=kept: kept.fill_(residual * dist.get_rank()))
        window = monitor.step_ended()
        if window is not None:
            readings = {key: (each.error, each.residual) for key, each in window.readings.items()}
            windows.append((window.error, readings))
    return windows


def test_windows_have_the_largest_readings_of_all_ranks():
    for windows in values_of(run_ranks(2, windows_with_readings, 2.0, 0.5)):
        assert windows == [(0.25, {"a": (0.25, 0.25)})] * 2, "b has no gradient"


@pytest.mark.parametrize(
    ("gradient", "residual", "expected"),
    [
        (math.inf, math.nan, []),
        (math.nan, math.nan, []),
        (0.0, 1.0, []),
        (1.0, math.nan, ["a"]),
        (1.0, math.inf, ["a"]),
    ],
)
def test_a_gradient_that_is_not_finite_is_not_read_and_a_residual_is(gradient, residual, expected):
    for windows in values_of(run_ranks(2, windows_with_readings, gradient, residual)):
        assert [list(readings) for _, readings in windows] == [expected] * 2
        assert all(each == (math.inf, math.inf) for _, readings in windows for each in readings.values())


# -------------------------------------------------------------------- the link


def rate_of_a_link(bit_per_s: float) -> tuple[float | None, float]:
    """The rate that is measured when all-reduces take as long as on a link, and the seconds that it takes."""
    now = [0.0]
    real = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        if kwargs.get("async_op"):
            now[0] += 0.002 + 8 * tensor.nbytes / bit_per_s  # each of two ranks sends as many bytes as it has
        return real(tensor, *args, **kwargs)

    dist.all_reduce = all_reduce
    try:
        return measured_bit_per_s(Ranks(group(), CPU), clock=lambda: now[0]), now[0]
    finally:
        dist.all_reduce = real


@pytest.mark.parametrize("bit_per_s", [1e7, 5e7, 1e9, 1e11])
def test_the_rate_of_a_link_leaves_latencies_out(bit_per_s):
    for found, seconds in values_of(run_ranks(2, rate_of_a_link, bit_per_s)):
        assert found == pytest.approx(bit_per_s, rel=1e-3)
        assert seconds < 0.3 or bit_per_s < 2e7


class OneRank:
    group, device = None, CPU


@pytest.mark.parametrize("is_new", [True, False])
def test_the_network_is_measured_before_plans_are_made_from_an_old_profile(is_new, monkeypatch):
    profiles = [Measured("profile", is_new)]
    monkeypatch.setattr(known, "measured_profile", lambda *_: profiles.pop(0))
    monkeypatch.setattr(known, "measured_bit_per_s", lambda ranks: 1e8)
    machine = known.KnownMachine(OneRank(), [])
    machine.look_again()
    machine.look()
    assert machine.bit_per_s == (None if is_new else 1e8)
    machine.look()
    assert (machine.machine, machine.bit_per_s) == ("profile", 1e8), "the new profile is an old one now"


def test_a_profile_that_failed_is_measured_again(monkeypatch):
    profiles = [Failure("no compiler"), Measured("profile", is_new=True)]
    monkeypatch.setattr(known, "measured_profile", lambda *_: profiles.pop(0))
    machine = known.KnownMachine(OneRank(), [])
    machine.look()
    assert machine.machine == Failure("no compiler")
    machine.look_again()
    machine.look()
    assert (machine.machine, machine.bit_per_s) == ("profile", None)


def test_a_machine_gets_the_link_that_was_measured():
    machine = SimpleMachine(link_nbytes_per_s=1e8)
    assert with_link(machine, None) is machine
    assert with_link(machine, 8.1e8) is machine, "about the same"
    assert sending_bit_per_s(with_link(machine, 1e8)) == pytest.approx(1e8, rel=0.01)
