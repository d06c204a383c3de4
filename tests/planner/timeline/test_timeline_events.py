"""Predicted steps in the format of recorded ones."""

from __future__ import annotations

import itertools
import json

import pytest

from gckernels import from_spec
from gckernels.planner.machines.machine import Overheads, Shared
from gckernels.planner.timeline.events import timeline_events
from gckernels.planner.timeline.pricing import Pricer
from gckernels.planner.timeline.timeline import Timeline, timeline
from gckernels.sync import Plan, Topology, UnitPlan
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.programs import PROGRAMS
from gckernels.sync.programs.steps import Place
from harness.replay import read_steps, replay
from predictions import RatedMachine, trace_of

KI = 1 << 10


def predicted(computes_on: Shared) -> Timeline:
    """A step in which codecs slow backward down, links are shared, and one average waits for another."""
    names = "abcdef"
    trace = trace_of(
        *((name, 4 * KI, 0.1 * number) for number, name in enumerate(names, start=1)),
        buckets=tuple((name,) for name in names),
        forward_s=0.3,
        optimizer_s=0.1,
    )
    compressed = [UnitPlan(name, 4 * KI, from_spec("BlockQuant"), PROGRAMS["alltoall"], True) for name in "abcf"]
    averaged = [UnitPlan(name, 4 * KI, from_spec("Identity"), PROGRAMS["allreduce"], False) for name in "de"]
    plan = Plan((*compressed, *averaged), Topology(4), channels=2)
    rates = dict.fromkeys(Place, 2e-6)
    overheads = Overheads(1e-3, 1e-4, 2e-3, 1e-3)
    machine = RatedMachine(
        Topology(4), 1e-5, element_s=rates, latency_s=5e-3, computes_on=computes_on, overheads=overheads
    )
    return timeline(plan, trace, Pricer(machine), Frontend.DDP)


@pytest.mark.parametrize("computes_on", [Shared.DEVICE, Shared.CORES])
def test_a_predicted_step_is_read_and_replayed_like_a_recorded_one(tmp_path, computes_on):
    """Its durations have everything that sharing adds, so on lanes alone they give the same step."""
    found = predicted(computes_on)
    path = tmp_path / "predicted.json"
    path.write_text(json.dumps(timeline_events(found)))
    (steps,) = read_steps(path).values()
    assert [message.bucket for message in steps[0]] == list(range(6))
    assert [stage.spec for message in steps[0] for stage in message.stages] == [stage.spec for stage in found.stages]
    again = replay(steps[0])
    first_s = min(message.submitted_s for message in steps[0])
    assert again.measured_s == pytest.approx(max(stage.end_s for stage in found.stages) - first_s)
    assert again.replayed_s == pytest.approx(again.measured_s)


def test_slices_of_a_row_do_not_overlap_and_counters_end_at_zero():
    found = predicted(Shared.CORES)
    events = timeline_events(found, process=7, name="mine")["traceEvents"]
    assert {event["pid"] for event in events} == {7}
    assert events[0]["args"] == {"name": "mine"}
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert list(names.values()) == [
        *("training", "compute-0", "average-0", "communicate-0-0", "compute-1", "communicate-1-0", "compute-2"),
    ]
    rows: dict[int, list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            rows.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    assert rows.keys() == names.keys()
    for spans in rows.values():
        spans.sort()
        assert all(end <= start + 1e-6 for (_, end), (start, _) in itertools.pairwise(spans))
    loads = [event for event in events if event["ph"] == "C" and event["name"] == "inter"]
    assert loads[-1]["args"]["load"] == 0.0 < max(event["args"]["load"] for event in loads)
