"""Windows of steps on real ranks, and the readings in them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist

from gckernels import decode, encode, from_spec, sync
from gckernels.devices import is_accelerator
from gckernels.sync.communication.ranks import Ranks
from gckernels.sync.resources.error_probe import Decoded, ProbedPiece, ProbeSchedule, Readings
from gckernels.sync.resources.residual import Residual
from gckernels.sync.tuning.watching.monitor import ANSWER_STEPS, READ_EVERY, Monitor, Window
from ranks import run_ranks, values_of

CPU = torch.device("cpu")
STEPS = 12  # in a window, more than a device takes to answer


def group() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


class FakeSpans:
    """Spans of given seconds, one after the other; for ever of one second by default."""

    def __init__(self, seconds: Iterable[tuple[float, float]] | None = None) -> None:
        self._left, self._met = itertools.repeat((0.0, 1.0)) if seconds is None else iter(seconds), []

    def meet(self) -> None:
        self._met = []

    forget = meet

    def end_step(self) -> None:
        self._met.append(next(self._left))

    def taken(self, but: int = 0) -> list[tuple[float, float]]:
        return self._met


def ranks() -> Ranks:
    return Ranks(group(), torch.get_default_device())


def windows_of_a_rank() -> tuple[int, list[Window | None]]:
    """Steps in which one rank waits for the other by turns, of which every fourth one is longer on both; and the steps
    after which an answer is read."""
    rank = dist.get_rank()
    spans = itertools.cycle([(1.0 - rank, 3.0), (1.0 * rank, 3.0), (1.0 - rank, 3.0), (0.0, 50.0)])
    monitor = Monitor(ranks(), FakeSpans(spans), window=STEPS)
    windows = [monitor.step_ended() for _ in range(4 * STEPS)]
    return ANSWER_STEPS if is_accelerator(torch.get_default_device()) else 1, windows


def test_a_window_is_the_median_of_the_steps_from_the_last_begin_of_all_ranks():
    for later, windows in values_of(run_ranks(2, windows_of_a_rank)):
        ends = [at for at, window in enumerate(windows) if window is not None]
        assert ends == [each * STEPS + later - 1 for each in (1, 2, 3)]
        assert {(window.steps, window.step_s) for window in windows if window is not None} == {(STEPS, 2.0)}


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


def norms_of_a_rank(
    compressor: str, program: str | sync.programs.Program | None
) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """The norms that were read in the third step, and those that follow from gradients and residuals."""
    torch.manual_seed(dist.get_rank())
    model, method = Fixed(), from_spec(compressor)
    attachment = sync.attach(model, sync.uniform_plan(model, compressor, program=program))
    runtime = attachment._frontend.runtime
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
                added = gradient = gradients[key].flatten()
                if before:
                    numel = gradient.numel()
                    given, left = method.accumulate(gradient, before[key])[-numel:], after[key][-numel:]
                    added = given - before[key][-numel:]
                else:  # without feedback
                    coded = encode(method, gradient)
                    given, left = gradient, gradient - decode(method, coded, gradient.numel())
                expected[:, at] = torch.stack([each.norm() for each in (added, given, left)])
        model.zero_grad(set_to_none=False)
    readings = runtime.watch.take()
    is_over = runtime.watch.now is None and runtime.watch.take() is None
    attachment.close()
    return readings.norms(keys, CPU), expected, is_over


@pytest.mark.parametrize(
    ("compressor", "program"),
    [
        ("BlockQuant(bits=4)", "allgather"),
        ("BlockQuant(bits=4)", "alltoall"),
        ("Cast16", None),
        ("BlockQuant", "allgather"),
        ("DGC", "allgather"),  # with a velocity
        ("DGC(momentum=0.0, clip=1.0)", "allgather"),
    ],
)
def test_readings_are_the_norms_of_one_step(compressor, program):
    for found, expected, is_over in values_of(run_ranks(2, norms_of_a_rank, compressor, program)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)  # the sums are in another order
        assert is_over, "the fourth step is not watched"


def readings_of_a_vote() -> float:
    """The largest norm that is read of majority votes."""
    model = Fixed()
    attachment = sync.attach(model, sync.uniform_plan(model, "SigNUM"))
    attachment._frontend.runtime.watch.ask()
    for _ in range(2):
        model({name: torch.randn(size) for name, size in SIZES.items()}).backward()
    norms = attachment._frontend.runtime.watch.take().norms(["first", "second"], CPU)  # the bias is sent exactly
    attachment.close()
    return float(norms.max())


def test_a_vote_has_no_error():
    assert values_of(run_ranks(2, readings_of_a_vote)) == [0.0, 0.0]


def test_a_unit_without_a_gradient_has_no_reading_although_its_velocity_goes_on():
    states = torch.ones(8)
    piece = Decoded("a", torch.zeros(4), lambda out: out.zero_(), states, from_spec("DGC").accumulate)
    readings = Readings()
    readings.around([piece], lambda: None)
    assert readings.norms(["a"], CPU)[0] == 0.0


def test_a_ring_reads_the_residual_of_all_shards():
    for found, expected, _ in values_of(run_ranks(2, norms_of_a_rank, "BlockQuant(bits=4)", sync.programs.ring(2))):
        torch.testing.assert_close(found[2], expected[2], rtol=1e-4, atol=0)
        assert (found[1] > expected[1]).all(), "the gradients of both ranks are in the second half"


def norms_of_a_mean(compressor: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The norms of means that sketches give in some steps, and those of the means."""
    torch.manual_seed(7 + dist.get_rank())
    model = Fixed()
    attachment = sync.attach(model, sync.uniform_plan(model, compressor))
    watch, found = attachment._frontend.runtime.watch, []
    key, size = "first", SIZES["first"]
    for step in range(6):
        gradients = {name: torch.randn(each) for name, each in SIZES.items()}
        before = attachment.state_dict()["feedback"]["worker"].get(key, torch.zeros(size).flatten())
        watch.ask()
        model(gradients).backward()
        if step > 0:  # the first one is exact
            after, gradient = attachment.state_dict()["feedback"]["worker"][key], gradients[key].flatten()
            means = torch.stack((gradient, gradient + before, after))
            dist.all_reduce(means)
            sketches = watch.take().sketches([key, "second"], CPU)
            dist.all_reduce(sketches)
            found.append((sketches[0].norm(dim=1), means.norm(dim=1)))
        model.zero_grad(set_to_none=False)
    attachment.close()
    return found


@pytest.mark.parametrize("compressor", ["PowerSGD(rank=2)", "PowerSGD(rank=2, one_sided=True)"])
def test_low_rank_methods_are_read_by_the_mean_of_all_ranks(compressor):
    for steps in values_of(run_ranks(2, norms_of_a_mean, compressor)):
        assert len(steps) == 5
        for found, expected in steps:
            torch.testing.assert_close(found, expected, rtol=0.15, atol=0)  # a sketch has 4 % of noise


def window_of_means() -> Window:
    """Residuals that hold what the gradients of two ranks differ by, and a hundredth of their mean."""
    watch = ProbeSchedule()
    monitor = Monitor(ranks(), FakeSpans(), watch, ("a", "b"), ("a",), window=STEPS)
    mean, apart = torch.arange(3000.0), (1 - 2 * dist.get_rank()) * torch.ones(3000)
    windows = []
    for _ in range(STEPS * (READ_EVERY + 1)):
        watch.begin_step(True)
        if watch.now is not None:
            watch.now.before("a", mean + 1e3 * apart, -1e3 * apart)
            watch.now.after("a", mean, 1e5 * apart + 0.01 * mean)
        windows.append(monitor.step_ended())
    return [each for each in windows if each is not None][READ_EVERY - 1]


def test_the_difference_of_ranks_is_no_error():
    for window in values_of(run_ranks(2, window_of_means)):
        assert window.readings.keys() == {"a"} and window.readings["a"].error == pytest.approx(0.01, rel=1e-2)
        assert window.error == window.readings["a"].error


def test_readings_of_nothing_are_zero():
    readings = Readings()
    assert torch.equal(readings.norms(["a", "b"], CPU), torch.zeros(3, 2))
    assert readings.norms([], CPU).shape == (3, 0)
    readings.around([ProbedPiece("a", torch.full((4,), 2.0), Residual(torch.zeros(4), 4))], lambda: None)
    assert readings.norms(["b", "a"], CPU).tolist() == [[0.0, 4.0], [0.0, 4.0], [0.0, 0.0]]


def test_only_steps_that_compress_are_watched():
    watch = ProbeSchedule()
    watch.ask()
    watch.begin_step(False)
    assert watch.now is None and watch.take() is None
    watch.begin_step(True)
    assert watch.now is not None
    watch.begin_step(True)
    assert watch.now is None and watch.take() is not None and watch.take() is None


def windows_with_readings(gradient: float, residual: float) -> list[tuple[float, dict[str, tuple[float, float]]]]:
    """One step in the last of some windows is watched. Rank 1 leaves ``residual`` of a gradient."""
    watch = ProbeSchedule()
    monitor = Monitor(ranks(), FakeSpans(), watch, ("a", "b"), window=STEPS)
    windows = []
    for _ in range(STEPS * (2 * READ_EVERY + 1)):
        watch.begin_step(True)
        if watch.now is not None:
            kept = torch.zeros(1)
            piece = ProbedPiece("a", torch.tensor([gradient]), Residual(kept, 1))
            watch.now.around([piece], lambda kept=kept: kept.fill_(residual * dist.get_rank()))
        window = monitor.step_ended()
        if window is not None:
            readings = {key: (each.error, each.residual) for key, each in window.readings.items()}
            windows.append((window.error, readings))
    return windows[READ_EVERY - 1 :: READ_EVERY]


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
