"""Timelines of models of FSDP2 with gathers of parameters, with numbers that a person can check.

Layers have 32 floats, and take a second of forward and one of backward. Between two ranks a gather sends half of them,
as a reduction to shards does, which takes half a second; an average of all takes a second. ``Cast16`` halves that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from gckernels import BlockQuant, Cast16, from_spec
from gckernels.codec import Codec
from gckernels.planner.choice import choose
from gckernels.planner.drafts.problem import Problem, shards_of
from gckernels.planner.machines.machine import Machine, Replicas, Sharding, Shared
from gckernels.planner.machines.scaling import scaled
from gckernels.planner.timeline.events import timeline_events
from gckernels.planner.timeline.pricing import Pricer
from gckernels.planner.timeline.timeline import Timeline, timeline
from gckernels.sync import Plan, Topology, UnitPlan
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.programs.named import SHARDS_OF_LEVELS, exact_program
from gckernels.sync.programs.spans import SHARD
from gckernels.sync.programs.steps import AllGather, AllToAll, Decode, Encode
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import TracedGather
from predictions import RatedMachine, trace_of

LINK_S = 1 / 128  # for a byte
DEVICE = RatedMachine(link_s=LINK_S)
HOST = replace(DEVICE, computes_on=Shared.CORES)
SHARDS = (Encode(), AllToAll(), Decode())


def layers(names: str) -> ModelTrace:
    """A trace of layers, the last one of which is first in backward. FSDP asks for the parameters of a layer when the
    one before has them."""
    count = len(names)
    forward = [TracedGather((name,), float(at), float(at)) for at, name in enumerate(names)]
    again = [
        TracedGather((name,), float(count + max(at - 1, 0)), float(count + at)) for at, name in enumerate(names[::-1])
    ]
    tensors = ((name, 32, float(at)) for at, name in enumerate(names[::-1], start=1))
    buckets = tuple((name,) for name in names[::-1])
    gathers = (*forward, *(again if count > 1 else ()))  # a single layer is the root, which keeps its parameters
    return trace_of(*tensors, buckets=buckets, forward_s=float(count), gathers=gathers)


ONE, TWO = layers("a"), layers("ab")


def predicted(
    trace: ModelTrace,
    machine: Machine,
    spec: str = "",
    weights: Codec | None = None,
    program: Sequence[object] = SHARDS,
    sharding: Sharding | None = None,
) -> Timeline:
    """A step in which all gradients are compressed, or none."""
    sharding = sharding or Sharding()
    steps = tuple(program) if spec else exact_program(sharding.span)
    method = from_spec(spec or "Identity")
    units = tuple(UnitPlan(each.name, each.numel, method, steps, False) for each in trace.tensors[::-1])
    frontend = Frontend.FSDP if sharding.span == SHARD else Frontend.HSDP
    return timeline(Plan(units, frontend=frontend, weights=weights), trace, Pricer(machine, sharding), frontend)


def gathers(found: Timeline) -> list[tuple[str, float, float]]:
    times = found.run.times
    return [("".join(names), times.start_s[first], times.end_s[last]) for names, first, last in found.gathers]


def test_one_group_is_gathered_before_forward_and_reduced_after_backward():
    """Half a second of gathering, a second of forward and one of backward, half a second of reducing."""
    found = predicted(ONE, DEVICE)
    assert (found.forward_s, found.backward_s, found.exposed_s, found.step_s) == (1.5, 1.0, 0.5, 3.0)
    assert gathers(found) == [("a", 0.0, 0.5)]
    assert predicted(ONE, DEVICE, "Cast16").step_s == 2.75
    assert predicted(ONE, DEVICE, "Cast16", Cast16()).step_s == 2.5
    assert predicted(ONE, DEVICE, "", Cast16()).step_s == 2.75


def test_the_reduction_of_hosts_sends_twice_as_much_and_is_waited_for():
    found = predicted(ONE, HOST)
    assert (found.backward_s, found.exposed_s, found.step_s) == (2.0, 0.0, 3.5)
    assert predicted(ONE, HOST, "Identity").step_s == 3.0  # an attachment sends as much as a reduction to shards does


def test_computation_hides_gathers_and_reductions():
    """Only what the first layer waits for is seen, and what the last reduction takes.

    time     0    1    2    3    4    5    6
    link     aa   ··bb·bbaa··bb··aa
    compute   ·aaaa··bbbb··bbbbaaaa
    """
    found = predicted(TWO, DEVICE)
    assert gathers(found) == [("a", 0.0, 0.5), ("b", 1.5, 2.0), ("b", 3.0, 3.5), ("a", 3.5, 4.0)]
    assert (found.forward_s, found.backward_s, found.exposed_s, found.step_s) == (3.0, 2.5, 0.5, 6.0)


def test_gathers_and_reductions_share_the_link():
    """With a link of a quarter of the speed, each takes 2 seconds. The gather of the first layer lasts from 8 to 10 if
    it is alone. But at 9 the reduction of the last layer begins, so it ends at 11; the reduction, of which half is left
    then, at 12, and the other one, which begins at 12, at 14."""
    found = predicted(TWO, replace(DEVICE, link_s=4 * LINK_S))
    assert gathers(found) == [("a", 0.0, 2.0), ("b", 3.0, 5.0), ("b", 6.0, 8.0), ("a", 8.0, 11.0)]
    assert found.step_s == 14.0
    load = found.utilisation[Shared.INTER]
    assert load.work_s == pytest.approx(6 * 2.0) and max(load.load) <= 1.0


def test_hosts_wait_for_everything_at_once_unless_something_is_attached():
    """Four gathers of half a second, four layers of a second, and two reductions of a second. Attached, the gather of
    the first layer in backward runs beside the last layer's backward, as the messages do beside the first one's."""
    assert predicted(TWO, HOST).step_s == 8.0
    found = predicted(TWO, HOST, "Cast16")
    assert found.step_s == 5.75
    assert [(each.spec.name, each.start_s, each.end_s) for each in found.stages if each.end_s > each.start_s] == [
        ("AllToAll", 4.5, 4.75),
        ("AllToAll", 5.5, 5.75),
    ]


def test_differences_are_gathered_once_in_a_step():
    found = predicted(TWO, HOST, "Cast16", BlockQuant(bits=4))
    assert ["".join(each.names) for each in found.gathers] == ["a", "b"]
    assert found.step_s < predicted(TWO, HOST, "Cast16", BlockQuant()).step_s


def test_a_third_group_waits_for_the_memory_of_the_first():
    """Messages take 4 seconds each, and backward 1 second for a layer, so all of it waits for messages but the first
    two. The third one can be encoded when the first one has arrived."""
    trace = layers("abc")
    trace = replace(trace, gathers=())
    found = predicted(trace, replace(DEVICE, link_s=8 * LINK_S), "Identity")
    starts = [each.start_s for each in found.stages if each.spec.name == "AllToAll"]
    assert starts == [4.0, 8.0, 12.0]
    assert found.backward_s == pytest.approx(8.0 - 3.0)  # the third launch, at 6, waits until 8
    assert found.step_s == 16.0


def test_replicas_average_the_shards_of_a_rank():
    """Links inside a machine are four times as fast, and a rank has 16 of the 32 floats. The gather and the reduction
    inside take an eighth of a second each. The average over two machines sends 64 bytes, half a second."""
    machine = Replicas(replace(DEVICE, topology=Topology(2, 2), fabric_s=LINK_S / 4))
    shards, sharding = shards_of(ONE, 2), Sharding(2)
    found = predicted(shards, machine, sharding=sharding)
    assert gathers(found) == [("a", 0.0, 0.125)]
    assert found.step_s == 2.0 + 0.125 + 0.125 + 0.5
    assert found.busy_s == {Shared.INTRA: 0.25, Shared.INTER: 0.5, Shared.DEVICE: 2.0}
    both_ways = (Encode(), AllGather(), Decode())
    assert predicted(shards, machine, "Cast16", None, both_ways, sharding).step_s == 2.0 + 0.125 + 0.125 + 0.25


def test_replicas_on_hosts_wait_for_the_reduction_inside_before_they_send():
    """The reduction inside takes twice as long there, and the average follows in the thread of the training."""
    machine = Replicas(replace(HOST, topology=Topology(2, 2), fabric_s=LINK_S / 4))
    shards, sharding = shards_of(TWO, 2), Sharding(2)
    assert predicted(shards, machine, sharding=sharding).step_s == 4.0 + 4 * 0.125 + 2 * 0.25 + 2 * 0.5
    found = predicted(shards, machine, "Cast16", None, (Encode(), AllGather(), Decode()), sharding)
    assert found.step_s == 4.0 + 4 * 0.125 + 2 * 0.25 + 0.25  # the first message is sent beside backward


def test_gradients_that_are_added_up_inside_machines_are_predicted():
    topology = Topology(2, 2)
    units = (UnitPlan("a", 32, Cast16(), SHARDS_OF_LEVELS, False),)
    plan = Plan(units, topology, frontend=Frontend.FSDP)
    found = timeline(plan, ONE, Pricer(replace(DEVICE, topology=topology), Sharding()), Frontend.FSDP)
    names = [stage.spec.name for stage in found.stages if stage.end_s > stage.start_s]
    assert names == ["ReduceScatter(intra)", "AllToAll(inter)"]
    assert found.step_s == pytest.approx(found.forward_s + found.backward_s + found.exposed_s)


def test_frozen_parameters_are_gathered_with_the_others():
    gather = replace(ONE.gathers[0], frozen_numel=96)
    assert predicted(replace(ONE, gathers=(gather,)), DEVICE).forward_s == 1.0 + 2.0


def problem_of(machine: Machine, weights: Codec | None = None) -> Problem:
    allowed = {tensor.name: (Cast16(), BlockQuant(bits=4)) for tensor in TWO.tensors}
    return Problem(TWO, Pricer(machine, Sharding()), Frontend.FSDP, allowed, weights=weights)


def test_policies_plan_for_shards_and_auto_is_the_fastest():
    choice = choose(problem_of(HOST))
    steps = {row.policy: row.step_s for row in choice.rows}
    assert set(steps) == {"none", "all", "threshold", "auto"}
    assert steps["none"] == 8.0 and steps["auto"] == min(steps.values())
    for row in choice.rows:
        assert row.plan.frontend == Frontend.FSDP and not row.plan.has_launches
        assert {unit.program for unit in row.plan.units} <= {SHARDS, exact_program(SHARD)}


def test_exact_plans_through_the_engine_are_tried_on_hosts():
    """Nothing may be compressed, and FSDP's own reduction there sends twice as much and is waited for."""
    choice = choose(replace(problem_of(HOST), allowed={}))
    assert choice.plan.compresses and choice.row.step_s == 6.0


def test_without_compression_parameters_are_gathered_as_they_are():
    with_weights, without = choose(problem_of(HOST, Cast16())), choose(problem_of(HOST))
    assert with_weights.none.step_s == without.none.step_s
    assert with_weights.row.step_s < without.row.step_s


def test_other_links_of_machines_with_replicas_are_those_between_machines():
    machine = Replicas(replace(DEVICE, topology=Topology(2, 2)))
    slower = scaled(machine, bandwidth_bit_per_s=1.0)
    assert isinstance(slower, Replicas) and slower.topology == Topology(2)


@pytest.mark.parametrize(
    ("frontend", "sharding", "trace", "problem"),
    [
        (Frontend.DDP, Sharding(), TWO, "shards of another kind of model than ddp"),
        (Frontend.FSDP, None, TWO, "shards of another kind of model than fsdp"),
        (Frontend.HSDP, Sharding(), TWO, "shards of another kind of model than hsdp"),
        (Frontend.FSDP, Sharding(), replace(TWO, gathers=()), "record it from a model of fully_shard"),
    ],
)
def test_problems_that_contradict_themselves_are_refused(frontend, sharding, trace, problem):
    with pytest.raises(ValueError, match=problem):
        Problem(trace, Pricer(DEVICE, sharding), frontend)


def test_the_events_of_a_timeline_have_the_gathers():
    events = timeline_events(predicted(TWO, DEVICE))["traceEvents"]
    shown = [(each["name"], each["ts"], each["dur"]) for each in events if each.get("cat") == "gather"]
    assert shown == [("a", 0.0, 5e5), ("b", 1.5e6, 5e5), ("b", 3e6, 5e5), ("a", 3.5e6, 5e5)]
