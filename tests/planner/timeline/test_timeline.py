"""Timelines: worked examples of what compression does to a step, with numbers that a person can check.

In all of them the link sends the gradient of 8 elements per second between two ranks. ``Cast16`` halves what is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from gckernels import from_spec
from gckernels.planner.machines.machine import Floats, Overheads, Price, Shared
from gckernels.planner.timeline.pricing import Pricer
from gckernels.planner.timeline.timeline import Timeline, timeline
from gckernels.sync import Plan, Topology, UnitPlan
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.programs import PROGRAMS, Program
from gckernels.sync.programs.steps import AllReduce, Broadcast, Decode, Encode, Level, Place, Reduce
from gckernels.sync.traces.model_trace import ModelTrace
from planning import PLANNED
from predictions import RatedMachine, trace_of

LINK_S = 1 / 32  # for a byte: 8 floats in an all-reduce of two ranks take a second
ON_HOST: Program = (Encode(Place.HOST), *PROGRAMS["allgather"][1:2], Decode(Place.HOST))


def plan_of(trace: ModelTrace, programs: dict[str, Program | str], topology: Topology | None = None) -> Plan:
    """A plan that sends the tensors named in ``programs`` with ``Cast16``, and averages the others in place."""
    units = []
    for tensor in reversed(trace.tensors):
        program = programs.get(tensor.name, "allreduce")
        steps = PROGRAMS[program] if isinstance(program, str) else program
        method = from_spec("Cast16" if tensor.name in programs else "Identity")
        units.append(UnitPlan(tensor.name, tensor.numel, method, steps, False))
    return Plan(tuple(units), topology)


def predict(trace: ModelTrace, machine: RatedMachine, frontend: Frontend = Frontend.DDP, **programs) -> Timeline:
    return timeline(plan_of(trace, programs), trace, Pricer(machine), frontend)


def spans(predicted: Timeline, key: str) -> list[tuple[str, float, float]]:
    """The stages of a unit that take time, with start and end."""
    stages = [stage for stage in predicted.stages if key in stage.keys and stage.end_s > stage.start_s]
    return [(stage.spec.name, stage.start_s, stage.end_s) for stage in stages]


EACH = (("a",), ("b",), ("c",))


def test_compressing_before_a_bubble_gains_nothing():
    """``a`` is sent from 1 to 2, and the link is idle until ``b`` is ready at 4. Only what follows the bubble counts.

    time    0    1    2    3    4    5    6    7
    link         aaaa           bbbbbbbbbbbbbb
    """
    trace = trace_of(("a", 8, 1.0), ("b", 24, 4.0), buckets=EACH[:2])
    machine = RatedMachine(link_s=LINK_S)
    plain = predict(trace, machine)
    assert spans(plain, "a") == [("Average", 1.0, 2.0)] and spans(plain, "b") == [("Average", 4.0, 7.0)]
    assert (plain.step_s, plain.exposed_s) == (7.0, 3.0)
    assert predict(trace, machine, a="allgather").step_s == 7.0
    assert predict(trace, machine, b="allgather").step_s == 5.5


def test_encoding_on_the_device_delays_backward():
    """Encoding ``a`` takes a second of the device, and backward two more. From 1 both run at half speed: the encoding
    ends at 3, when backward has done 1 of its 2 seconds. The decoding of two payloads begins at 3.5, so the last half
    second of backward takes a second, and ends at 4.5 instead of 3."""
    trace = trace_of(("a", 8, 1.0), ("b", 8, 3.0), buckets=EACH[:2])
    machine = RatedMachine(link_s=LINK_S, element_s={Place.DEVICE: 1 / 8, Place.HOST: 0.0})
    predicted = predict(trace, machine, a="allgather")
    assert spans(predicted, "a")[:2] == [("Encode", 1.0, 3.0), ("AllGather", 3.0, 3.5)]
    assert predicted.backward_s == 4.5
    assert spans(predicted, "b") == [("Average", 4.5, 5.5)]
    assert spans(predicted, "a")[2] == ("Decode", 3.5, 6.0)  # alone from 4.5 on


def test_encoding_on_the_host_delays_only_its_own_message():
    """The copy of ``a`` takes 1 second, the encoding 2, half of the message 0.5; backward still ends at 3."""
    trace = trace_of(("a", 8, 1.0), ("b", 8, 3.0), buckets=EACH[:2])
    rates = {Place.DEVICE: 1 / 8, Place.HOST: 1 / 4}
    predicted = predict(trace, RatedMachine(link_s=LINK_S, element_s=rates, copy_s=1 / 32), a=ON_HOST)
    assert spans(predicted, "a")[:2] == [("Copy(host)", 1.0, 2.0), ("Encode(host)", 2.0, 4.0)]
    assert predicted.backward_s == 3.0
    # b has the link to itself from 3 to 4, and shares it with the all-gather of a, half a second of work, until 5
    assert spans(predicted, "b") == [("Average", 3.0, 4.0)]
    assert spans(predicted, "a")[2][1:] == (4.0, 4.5)


@pytest.mark.parametrize(("numel", "indivisible_s", "divisible_s"), [(64, 2.5, 2.75), (256, 7.0, 5.0)])
def test_divisible_programs_pay_for_large_tensors(numel, indivisible_s, divisible_s):
    """Between four ranks an all-gather sends 3 payloads, and an all-to-all and an all-gather of shards 3/4 each. They
    have one more latency of a second: 1 + 1.5 seconds against 2 + 0.75 for 64 elements."""
    trace = trace_of(("a", numel, 0.0), buckets=(("a",),))
    machine = RatedMachine(Topology(4), link_s=1 / 256, latency_s=1.0)
    assert predict(trace, machine, a="allgather").step_s == pytest.approx(indivisible_s)
    assert predict(trace, machine, a="alltoall").step_s == pytest.approx(divisible_s)


def test_messages_on_several_lanes_share_the_link():
    """Averages, and collectives of two phases, are on three lanes. Together they take as long as on one."""
    trace = trace_of(("a", 8, 1.0), ("b", 8, 1.0), ("c", 16, 1.0), buckets=EACH)
    machine = RatedMachine(link_s=LINK_S)
    for programs in ({}, {"c": "allgather"}, {"b": "allgather", "c": "alltoall"}):
        predicted = predict(trace, machine, **programs)
        work_s = predicted.busy_s[Shared.INTER]
        assert predicted.step_s == pytest.approx(1.0 + work_s)
        load = predicted.utilisation[Shared.INTER]
        assert load.work_s == pytest.approx(work_s) and max(load.load) <= 1.0 + 1e-12


def test_overheads_delay_backward_and_stages():
    """A hook of 0.1 s for each of two launches, 3 stages with 0.01 s each on the submitting thread, 0.2 s on lanes."""
    trace = trace_of(("a", 8, 1.0), ("b", 8, 2.0), buckets=EACH[:2])
    overheads = Overheads(stage_s=0.2, submit_s=0.01, hook_s=0.1, plain_s=0.05)
    machine = RatedMachine(link_s=LINK_S, overheads=overheads)
    hooked = predict(trace, machine, b="allgather")
    assert hooked.backward_s == pytest.approx(2.0 + 2 * 0.1 + (1 + 3) * 0.01)
    assert spans(hooked, "a") == [("Average", pytest.approx(1.11), pytest.approx(2.31))]
    assert spans(hooked, "b")[0] == ("Encode", pytest.approx(2.22), pytest.approx(2.42))
    plain = predict(trace, machine)  # no engine, no hook
    assert spans(plain, "a") == [("Average", pytest.approx(1.05), pytest.approx(2.05))]
    assert plain.backward_s == pytest.approx(2.1)
    own = predict(trace, machine, Frontend.MODULE)
    assert own.backward_s == pytest.approx(2.11)  # one launch of both


def test_a_step_has_forward_and_optimizer_around_it():
    trace = trace_of(("a", 8, 1.0), buckets=EACH[:1], forward_s=2.0, optimizer_s=0.5)
    predicted = predict(trace, RatedMachine(link_s=LINK_S))
    assert (predicted.forward_s, predicted.backward_s, predicted.exposed_s) == (2.0, 1.0, 1.0)
    assert (predicted.optimizer_s, predicted.step_s) == (0.5, 4.5)
    assert spans(predicted, "a") == [("Average", 3.0, 4.0)] and predicted.backward == ((2.0, 3.0),)
    device = predicted.utilisation[Shared.DEVICE]
    assert device.work_s == pytest.approx(3.5) == predicted.busy_s[Shared.DEVICE]


def test_ddp_copies_averaged_gradients_bucket_by_bucket():
    """The copy of the first bucket is hidden behind the average of the second one, which ends at 5; its own is not."""
    trace = trace_of(("a", 8, 1.0), ("b", 8, 3.0), buckets=EACH[:2])
    machine = RatedMachine(link_s=LINK_S, copy_s=1 / 128)
    copying = replace(trace, copies_gradients=True)
    assert predict(copying, machine).step_s == predict(trace, machine).step_s + 32 / 128
    launches = {frontend: predict(copying, machine, frontend).exposed_s for frontend in PLANNED}
    assert launches[Frontend.MODULE] == predict(trace, machine, Frontend.MODULE).exposed_s


def test_one_rank_alone_sends_nothing():
    trace = trace_of(("a", 8, 1.0), ("b", 8, 2.0))
    predicted = predict(trace, RatedMachine(Topology(1), link_s=LINK_S), a="allgather")
    assert predicted.stages == () and predicted.step_s == 2.0


def test_roots_of_one_machine_share_its_card():
    """Each device of two machines is the root of a tensor. The card of a machine sends one of them in a second, or both
    at half the speed."""
    program = (Reduce(Level.INTRA), AllReduce(Level.INTER), Broadcast(Level.INTRA))
    trace = trace_of(("a", 8, 1.0), ("b", 8, 1.0), buckets=EACH[:2])
    units = [UnitPlan(name, 8, from_spec("Identity"), program, False, root=root) for root, name in enumerate("ba")]
    machine = RatedMachine(Topology(2, 2), link_s=2 * LINK_S, fabric_s=0.0)
    predicted = timeline(Plan(tuple(units), Topology(2, 2)), trace, Pricer(machine), Frontend.DDP)
    assert predicted.step_s == 3.0 and predicted.busy_s[Shared.INTER] == 2.0


@pytest.mark.parametrize(("roots", "uneven_s"), [((0, 1, 2, 3), 0.0), ((0, 0, 1, 2), 1 / 3), ((0, 0, 0, 0), 1.0)])
def test_a_link_carries_more_where_roots_are_on_few_machines(roots, uneven_s):
    """Four messages go through servers on four machines. A gather loads the card of its root four times the mean."""

    @dataclass(frozen=True)
    class Machine(RatedMachine):
        def collective(
            self, step: str, level: Level, place: Place, wire_nbytes: Floats, from_roots: bool = False
        ) -> Price:
            price = super().collective(step, level, place, wire_nbytes)
            busiest_s = {Shared.INTER: 4 * price.alone_s} if step == "Gather" else {}
            return Price(max(1, 4 * len(busiest_s)) * price.alone_s, price.work_s, busiest_s=busiest_s)

    trace = trace_of(*((name, 8, 0.0) for name in "abcd"), buckets=tuple((name,) for name in "abcd"))
    units = tuple(
        UnitPlan(name, 8, from_spec("Cast16"), PROGRAMS["parameter_server"], False, root=root)
        for name, root in zip("dcba", roots, strict=True)
    )
    plan, machine = Plan(units, Topology(4)), Machine(Topology(4), link_s=LINK_S)
    predicted = timeline(plan, trace, Pricer(machine), Frontend.DDP)
    sent_s = 3 / 4 * 16 * LINK_S  # one gather or broadcast, as a mean over all links
    assert predicted.busy_s[Shared.INTER] == pytest.approx(4 * sent_s * (2 + 3 * uneven_s))


def test_the_work_of_other_roots_delays_a_message_and_loads_nothing_here():
    """Each rank is the root of one of two tensors, and the timeline is the one of the larger tensor's root, ``a``.

    There, two payloads of ``a`` are decoded and the result encoded in 8 seconds of the device: from 10 on at half
    speed, until backward ends at 16, then beside the encoding of ``b``, until 20, then alone, until 23. The same takes
    4 seconds for ``b`` at its own root: from 20.5 to 24.5, and the device here is not slowed down by it. The decoding
    of ``a`` is before that of ``b`` on their lane.
    """
    units = [
        UnitPlan(name, numel, from_spec("Cast16"), PROGRAMS["parameter_server"], False, root=root)
        for name, numel, root in (("b", 16, 1), ("a", 32, 0))
    ]
    trace = trace_of(("a", 32, 1.0), ("b", 16, 9.0), buckets=EACH[:2])
    machine = RatedMachine(link_s=LINK_S, element_s={Place.DEVICE: 1 / 8, Place.HOST: 0.0})
    predicted = timeline(Plan(tuple(units), Topology(2)), trace, Pricer(machine), Frontend.DDP)
    assert spans(predicted, "a") == [
        *(("Encode", 1.0, 9.0), ("Gather", 9.0, 10.0), ("Recode", 10.0, 23.0)),
        *(("Broadcast", 23.0, 24.0), ("Decode", 24.0, 28.0)),
    ]
    assert spans(predicted, "b") == [
        *(("Encode", 16.0, 20.0), ("Gather", 20.0, 20.5), ("Broadcast", 24.5, 25.0), ("Decode", 28.0, 30.0)),
    ]
