"""The machine of a training: prices that explain the stages of recorded steps."""

from __future__ import annotations

import numpy as np
import pytest

from gckernels import BlockQuant, Cast16, EFSignSGD
from gckernels.planner.machines.codecs import moved_nbytes_per_element
from gckernels.planner.machines.machine import MachineError, Shared
from gckernels.planner.predictive.trial_machine import CodecFit, StageTime, TrialMachine, stage_times
from gckernels.sync.engine.recorded_step import RecordedStage, RecordedStep
from gckernels.sync.plans.plan import Plan
from gckernels.sync.plans.units import UnitPlan
from gckernels.sync.programs import Level, Place
from gckernels.sync.programs.named import ALLGATHER
from gckernels.sync.programs.stages import StageKind

FOUR = BlockQuant(bits=4)
NBYTES = [1e4, 1e5, 1e6, 1e7]
STAGES = [
    *(StageTime("AllGather", "", nbytes, 1e-3 + nbytes / 1e8) for nbytes in NBYTES),
    *(StageTime("encode", str(FOUR), nbytes, 2e-5 + nbytes / 4e9) for nbytes in NBYTES),
    *(StageTime("decode", str(FOUR), nbytes, 1e-5 + nbytes / 8e9) for nbytes in NBYTES),
]
MACHINE = TrialMachine.of(STAGES, 2, Shared.CORES, 1.0)


def test_prices_are_those_of_the_recorded_stages():
    price = MACHINE.collective("AllGather", Level.FLAT, Place.DEVICE, np.array([1e5, 5e6]))
    np.testing.assert_allclose(price.alone_s, [2e-3, 51e-3], rtol=1e-6)
    for work, launch_s, rate in ((StageKind.ENCODE, 2e-5, 4e9), (StageKind.DECODE, 1e-5, 8e9)):
        elements = np.array([3e5])
        price = MACHINE.codec(work, FOUR, Place.DEVICE, np.ones(1), elements, 2)
        expected = launch_s + elements * moved_nbytes_per_element(work, FOUR, 2) / rate
        np.testing.assert_allclose(price.alone_s, expected, rtol=1e-6)
        np.testing.assert_array_equal(price.work_s[Shared.CORES], price.alone_s)


def test_a_codec_that_was_not_recorded_is_as_fast_as_the_others():
    price = MACHINE.codec(StageKind.ENCODE, EFSignSGD(), Place.DEVICE, np.ones(1), np.array([1e6]), 1)
    moved = 1e6 * moved_nbytes_per_element(StageKind.ENCODE, EFSignSGD(), 1)
    assert moved / 8e9 < price.alone_s[0] < 2e-5 + moved / 4e9


def test_a_collective_that_was_not_recorded_has_no_price_unless_plain_averaging_needs_it():
    with pytest.raises(MachineError, match="AllToAll was not recorded"):
        MACHINE.collective("AllToAll", Level.FLAT, Place.DEVICE, np.array([1e5]))
    price = MACHINE.collective("AllReduce", Level.FLAT, Place.DEVICE, np.array([1e6]))
    np.testing.assert_allclose(price.alone_s, [11e-3], rtol=1e-6)


def test_units_of_no_message_cost_nothing():
    price = MACHINE.codec(StageKind.ENCODE, FOUR, Place.DEVICE, np.zeros(1), np.zeros(1), 1)
    assert price.alone_s.tolist() == [0.0]
    assert MACHINE.collective("AllGather", Level.INTRA, Place.DEVICE, np.array([1e5])).alone_s.tolist() == [0.0]


def test_without_a_recorded_step_there_is_no_machine():
    with pytest.raises(MachineError, match="no plan that compresses"):
        TrialMachine.of([StageTime("AllGather", "", 1e5, 1e-3)], 2, Shared.CORES, 1.0)


def test_fits_have_no_negative_seconds():
    fit = CodecFit.of([StageTime("encode", "x", nbytes, 1e-3 / nbytes) for nbytes in NBYTES])
    assert fit.byte_s >= 0.0 and fit.launch_s >= 0.0


def stage(name: str, kind: StageKind, message: int, start_s: float, **sizes: float) -> RecordedStage:
    category = "communicate" if kind is StageKind.COLLECTIVE else "compute"
    usual = {"sent_nbytes": 0.0, "elements": 4096, "read_nbytes": 4 * 4096}
    times = (start_s, start_s + 1e-3, 0.0, 0)
    return RecordedStage(name, category, kind, 0, *times, message, ("a", "b"), ("BlockQuant",), **(usual | sizes))


def test_the_stages_of_a_step_have_the_same_order_on_all_ranks():
    units = (UnitPlan("a", 4096, FOUR, ALLGATHER, True), UnitPlan("b", 16, Cast16(), ALLGATHER, False))
    payload = FOUR.payload_nbytes(4096)
    recorded = (
        stage("Encode", StageKind.ENCODE, 1, 0.1),
        stage("Encode", StageKind.ENCODE, 0, 0.0),
        stage("AllGather", StageKind.COLLECTIVE, 0, 0.2, sent_nbytes=payload),
        stage("Decode", StageKind.DECODE, 0, 0.3, read_nbytes=2 * payload),
    )
    found = stage_times(Plan(units), RecordedStep(3, 0, ("lane",), recorded, 0.1, 0.4, "plan"))
    assert [(each.name, each.spec) for each in found] == [
        ("encode", str(FOUR)),
        ("AllGather", ""),
        ("decode", str(FOUR)),
        ("encode", str(FOUR)),
    ]
    assert found[1].amount == payload
    assert found[2].amount == 4096 * moved_nbytes_per_element(StageKind.DECODE, FOUR, 2), "two payloads are merged"
    assert all(each.seconds == pytest.approx(1e-3) for each in found)
