"""The machine of a training: its link and its codecs are looked at again before plans are made from an old profile."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gckernels import BlockQuant
from gckernels.sync import Topology
from gckernels.sync.communication.agreement import Failure
from gckernels.sync.communication.ranks import Ranks
from gckernels.sync.planner.machines.curves import CodecModel, Coefficients, CollectiveCurve, CopyCurve, Curve
from gckernels.sync.planner.machines.machine import Overheads, Shared
from gckernels.sync.planner.machines.profile import Profile, Stamp
from gckernels.sync.planner.machines.scaling import sending_bit_per_s
from gckernels.sync.predictive import codec_probe, machine_cache
from gckernels.sync.predictive.bandwidth_probe import measured_bit_per_s, with_link
from gckernels.sync.predictive.codec_probe import ELEMENTS, measured_codec_speed, with_codec_speed
from gckernels.sync.predictive.machine_cache import Since
from gckernels.sync.predictive.measuring import Measured
from gckernels.sync.programs import Level, Place
from gckernels.sync.programs.stages import StageKind
from planning import SimpleMachine
from ranks import run_ranks, values_of

CPU = torch.device("cpu")


def group() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


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
def test_network_and_codecs_are_measured_before_plans_are_made_from_an_old_profile(is_new, monkeypatch):
    profiles = [Measured("profile", is_new)]
    monkeypatch.setattr(machine_cache, "measured_profile", lambda *_: profiles.pop(0))
    monkeypatch.setattr(machine_cache, "measured_bit_per_s", lambda ranks: 1e8)
    monkeypatch.setattr(machine_cache, "measured_codec_speed", lambda ranks, machine: 0.5)
    monkeypatch.setattr(machine_cache, "apart", lambda group, device, measure: measure(None))
    monkeypatch.setattr(machine_cache, "Ranks", lambda *_: OneRank())
    machine = machine_cache.KnownMachine(OneRank(), [])
    machine.look_again()
    machine.look()
    assert machine.since == (Since() if is_new else Since(1e8, 0.5))
    machine.look()
    assert (machine.machine, machine.since) == ("profile", Since(1e8, 0.5)), "the new profile is an old one now"


def test_a_profile_that_failed_is_measured_again(monkeypatch):
    profiles = [Failure("no compiler"), Measured("profile", is_new=True)]
    monkeypatch.setattr(machine_cache, "measured_profile", lambda *_: profiles.pop(0))
    machine = machine_cache.KnownMachine(OneRank(), [])
    machine.look()
    assert machine.machine == Failure("no compiler")
    machine.look_again()
    machine.look()
    assert (machine.machine, machine.since) == ("profile", Since())


def test_a_machine_gets_the_link_that_was_measured():
    machine = SimpleMachine(link_nbytes_per_s=1e8)
    assert with_link(machine, None) is machine
    assert with_link(machine, 8.1e8) is machine, "about the same"
    assert sending_bit_per_s(with_link(machine, 1e8)) == pytest.approx(1e8, rel=0.01)


# -------------------------------------------------------------------- codecs

ENCODE_S = 1e-3


def profile() -> Profile:
    """A profile of two ranks in which one encoding of the size that is measured takes :data:`ENCODE_S`."""
    curve = Curve((1e3, 1e7), (1e-4, 1e-1), (1e-6, 1e-3), 0.0)
    coefficients = Coefficients(0.0, 0.0, ENCODE_S / ELEMENTS)
    return Profile(
        name="two ranks",
        topology=Topology(2),
        computes_on=Shared.CORES,
        cores=1.0,
        overheads=Overheads(),
        collectives=(CollectiveCurve("AllReduce", Level.FLAT, Place.DEVICE, curve),),
        codecs=(
            CodecModel(BlockQuant(bits=4), StageKind.ENCODE, Place.DEVICE, coefficients, 1.0, 128, 1 << 24, 2, 0.0),
        ),
        copies=(CopyCurve(Shared.CORES, curve),),
        sharing={},
        taken={},
        left_out=(),
        stamp=Stamp(("a", "b"), "cpu", "gloo", "2.11", "0.1", "2026-01-01T00:00:00", 60.0),
    )


def speed_of_codecs(calls_s: float) -> tuple[float | None, float | None]:
    """The speed that is measured when a round of eight calls takes some seconds on the slowest rank, and that of a
    machine without codecs."""
    ranks, now_s = Ranks(group(), CPU), [0.0]

    def clock() -> float:
        now_s[0] += calls_s if ranks.rank else calls_s / 2
        return now_s[0]

    return measured_codec_speed(ranks, profile(), clock), measured_codec_speed(ranks, replace(profile(), codecs=()))


def test_the_speed_of_codecs_is_that_of_the_slowest_rank():
    (found, nothing), other = values_of(run_ranks(2, speed_of_codecs, 8 * 4 * ENCODE_S))
    assert (found, nothing) == other
    assert nothing is None and 0.1 < found <= 0.25  # ranks that share cores compute slower than one alone


def looks_in_vain() -> tuple[object, object, Since]:
    """The machine when an encoding raises on one rank while its speed is measured, and when it does so no more."""
    found = Measured(profile(), is_new=False)

    def fails(*_: object) -> None:
        raise MemoryError("no memory for an encoding")

    with mock.patch.object(machine_cache, "measured_profile", lambda *_: found):
        machine = machine_cache.KnownMachine(Ranks(group(), CPU), [])
    with mock.patch.object(codec_probe, "timed", fails if dist.get_rank() else codec_probe.timed):
        first, since = machine.look(), machine.since
    assert since == Since()
    return first, machine.look() is found.profile, machine.since


def test_a_measurement_that_fails_on_one_rank_fails_on_all():
    for failure, looked, since in values_of(run_ranks(2, looks_in_vain)):
        assert failure == Failure("MemoryError: no memory for an encoding (rank 1)")
        assert looked and since.codec_speed is not None


def test_a_machine_gets_the_speed_of_its_codecs():
    machine, one, elements = profile(), np.ones(1), np.full(1, float(ELEMENTS))
    assert with_codec_speed(machine, None) is with_codec_speed(machine, 1.2) is machine
    slow = Since(codec_speed=0.25).applied(machine)
    price = slow.codec(StageKind.ENCODE, BlockQuant(bits=4), Place.DEVICE, one, elements, 1)
    assert price.alone_s == pytest.approx(4 * ENCODE_S)
    assert Since().applied(machine) is machine
