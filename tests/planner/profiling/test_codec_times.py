"""Codecs and copies at several moments, of which some are disturbed: what no two moments agree on is measured again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gckernels
from gckernels.planner.machines.machine import Shared
from gckernels.planner.profiling.measurements import codec_times, memory
from gckernels.planner.profiling.measurements.codec_times import CodecTimes
from gckernels.planner.profiling.measurements.codecs import Case
from gckernels.planner.profiling.measurements.memory import CopyTimes
from gckernels.planner.profiling.measurements.session import MeasurementExtent
from gckernels.sync import Topology
from gckernels.sync.programs import Place
from gckernels.sync.programs.stages import StageKind

SESSION: Any = SimpleNamespace(extent=MeasurementExtent(), topology=Topology(2), ranks=SimpleNamespace(slowest=list))
ARENA: Any = SimpleNamespace(numel=1 << 24, flush=lambda *args, **options: None, device=torch.device("cpu"))


def line_s(case: Case) -> float:
    return 1e-5 + 1e-9 * case.elements


class Disturbed:
    """The times of launches, some of which take longer at the first moments.

    Args:
        monkeypatch: puts them in the place of measurements.
        moments: the number of moments that are disturbed.
        seconds: the seconds of a launch on a quiet machine.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, moments: int, seconds: Any = line_s) -> None:
        self.moments, self.seconds = moments, seconds
        self.measured: dict[Case, int] = {}
        monkeypatch.setattr(codec_times, "_times", self._times)

    def _times(self, session: object, arena: object, method: object, works: Any, case: Case) -> list[Any]:
        moment = self.measured.get(case, 0)
        self.measured[case] = moment + 1
        large = case.elements >= 1 << 18
        seconds = self.seconds(case) * (2.0 + moment + case.elements % 7 if large and moment < self.moments else 1.0)
        return [(seconds, 0.9 * seconds)] * len(works)


def times_of(works: tuple[StageKind, ...] = (StageKind.ENCODE,)) -> CodecTimes:
    (found,) = CodecTimes.measured(SESSION, ARENA, gckernels.Identity(), works, Place.DEVICE)
    return found


def test_a_quiet_machine_is_measured_twice(monkeypatch):
    disturbed = Disturbed(monkeypatch, 0)
    found = times_of()
    assert not found.disputed and set(disturbed.measured.values()) == {2}
    (model,) = found.models
    assert model.error == pytest.approx(0.0, abs=1e-6)


def test_disturbed_launches_are_measured_again_until_two_moments_agree(monkeypatch):
    disturbed = Disturbed(monkeypatch, 3)
    found, moments = times_of(), 0
    assert found.models[0].error > 0.1
    while found.disputed:
        assert all(case.elements >= 1 << 18 for case in found.disputed)
        found.again()
        moments += 1
    assert moments == 3 and max(disturbed.measured.values()) == 5  # two quiet ones
    assert found.models[0].error == pytest.approx(0.0, abs=1e-6)
    assert found.models[0].coefficients.element_s == pytest.approx(1e-9, rel=1e-3)


def test_what_is_still_disturbed_has_a_large_error(monkeypatch):
    """Also where all launches take longer alike, and so agree with each other."""
    disturbed = Disturbed(monkeypatch, 0)
    slow = iter([3.0] * 8 + [1.0] * 8)
    disturbed.seconds = lambda case: line_s(case) * next(slow, 1.0)
    found = times_of()
    assert len(disturbed.measured) >= 8 and found.models[0].error > 0.2 and found.disputed


def test_a_model_that_does_not_fit_is_not_measured_again(monkeypatch):
    """All moments agree: it is no disturbance."""
    Disturbed(monkeypatch, 0, lambda case: 1e-3 * (1 + case.elements.bit_length() // 2 % 2) * case.units)
    found = times_of()
    assert found.models[0].error > 0.1 and not found.disputed


def test_disturbed_copies_are_measured_again(monkeypatch):
    copies = 0

    def copy(session: object, arena: object, resource: object, nbytes: int) -> tuple[float, float]:
        nonlocal copies
        copies += 1
        seconds = 1e-5 + nbytes / 5e9
        return (seconds * (4.0 if copies < 100 and nbytes == memory.SIZES[-1] else 1.0), seconds)

    monkeypatch.setattr(memory, "_copy", copy)
    found = CopyTimes.measured(SESSION, ARENA, Shared.CORES)
    assert found.disputed and (found.curve.error or 0.0) > 0.2
    for _ in range(3):
        if found.disputed:
            found.again()
    assert not found.disputed and found.curve.error == pytest.approx(0.0, abs=1e-6)
