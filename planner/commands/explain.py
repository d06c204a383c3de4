"""The verb ``explain``: why a plan takes as long as it does, and what each of its choices is worth."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from gckernels.sync.plans.numbers import plural
from gckernels.sync.plans.plan import Frontend, Plan
from gckernels.sync.programs.topology import Topology
from gckernels.sync.traces.model_trace import ModelTrace

from ..drafts.problem import Problem
from ..machines.machine import MachineError
from ..timeline.events import timeline_events
from ..timeline.launches import launches_of
from ..timeline.timeline import Timeline
from .common.caveats import Band
from .common.console import Console
from .common.files import MAKE, STANDARD, add_outputs, reading
from .common.inputs import (
    add_problem,
    check_pictures,
    machine_of,
    plan_of,
    problem_of,
    problem_of_rounds,
    trace_of,
    with_sizes_of,
)
from .common.outcome import BLANK, Outcome, Part, bad_data, wrong_use
from .studies.explanation import differences, explain, judged
from .studies.memory import PlanMemory
from .studies.updates import NO_UPDATES, updates_instead
from .texts.explanation_text import comparison, parts
from .texts.pictures import draw_timelines
from .texts.use_text import use_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gckernels explain``."""
    parser.description = (
        "Say why a plan takes as long as it does: what each message costs, how the step would change if it were sent "
        "in another way, what the step waits for, and what faster links or free codecs would give. The largest "
        "messages are tried in other ways; --unit tries one unit."
    )
    add_problem(parser)
    parser.add_argument("plan", metavar="PLAN", help="file of gckernels plan; - is stdin")
    parser.add_argument("--unit", metavar="NAME", help="explain one unit or parameter instead of all messages")
    parser.add_argument(
        "--messages", type=int, default=8, metavar="N", help="try N messages in other ways (default: 8)"
    )
    parser.add_argument("--against", metavar="PLAN", help="compare with this plan, also in the picture")
    parser.add_argument("--png", metavar="FILE", help="draw lanes and links over time; needs matplotlib")
    parser.add_argument("--perfetto", metavar="FILE", help="write the timeline for ui.perfetto.dev")
    add_outputs(parser)


def run(given: argparse.Namespace, console: Console) -> Outcome:
    """Explain the plan."""
    check_pictures(given.png)
    if given.messages < 0:
        raise wrong_use(f"--messages must be 0 or more, got {given.messages}", "leave it out for 8")
    if given.against == given.plan:
        raise wrong_use(f"--against must be another plan than {given.plan}", MAKE["plan"])
    trace, machine = trace_of(given.trace), machine_of(given.machine)
    plans = {path: _plan_for(trace, path) for path in filter(None, (given.plan, given.against))}
    plan = plans[given.plan]
    if plan.made_for is not None:
        if given.frontend not in (None, plan.made_for.value):
            made_for = f"{given.plan} is for {plan.made_for.value}"
            raise wrong_use(f"--frontend {given.frontend}: {made_for}", "leave it out")
        given.frontend = plan.made_for.value
    problem, caveats = problem_of(given, trace, machine)
    if problem.frontend.replicates:
        plans = {path: with_sizes_of(problem.trace, each) for path, each in plans.items()}
        plan = plans[given.plan]
    timelines = {path: _timeline(problem, given.machine, path, each) for path, each in plans.items()}
    with reading(given.machine, "machine", (MachineError,)):
        found = explain(problem, plan, given.messages, given.unit, console.progress)
        predicted = timelines[given.plan]
        instead = updates_instead(problem, predicted.step_s, partial(problem_of_rounds, given, trace, machine))
    band, memory = replace(Band.of(problem), margin=problem.margin(predicted)), PlanMemory.of(problem, plan)
    results = parts(given.plan, found, band, given.unit)
    if given.against is not None:
        results.append(comparison(timelines, plans, band))
    results += [BLANK, memory.part()]
    if not memory.fits:
        results.append(Part(f"{given.plan} does not fit. {memory.why_not}"))
    results.append(NO_UPDATES if instead is None else instead.part())
    made_elsewhere = differences(plan, problem)
    if given.plan != STANDARD and not made_elsewhere:
        results.append(Part(f"{use_of(given.plan, problem)}."))
    results += [band.part(), Part(None, caveats.record())]
    files: dict[str | None, str | bytes] = {}
    if given.png is not None:
        files[given.png] = draw_timelines(timelines, band)
    if given.perfetto is not None:
        files[given.perfetto] = _events(timelines, band)
    notes = [f"{given.plan}: {line}" for line in made_elsewhere] + caveats.lines()
    return Outcome(results, files, notes)


def _plan_for(trace: ModelTrace, path: str) -> Plan:
    """The plan in a file, which is refused if it is for another model."""
    plan = plan_of(path)
    with reading(path, "plan", (ValueError,)):
        launches_of(plan, trace, plan.made_for or Frontend.MODULE)
    return plan


def _timeline(problem: Problem, machine: str, path: str, plan: Plan) -> Timeline:
    """The timeline of a plan, which is refused if it is for another topology, or if its programs do not work there."""
    if plan.topology not in (None, problem.topology):
        has = f"{problem.machine.name} has {_ranks(problem.topology)}"
        raise bad_data(f"{path}: the plan is for {_ranks(plan.topology)}, and {has}", MAKE["plan"])
    with reading(path, "plan", (ValueError,)), reading(machine, "machine", (MachineError,)):
        return judged(problem, plan)


def _ranks(topology: Topology) -> str:
    return f"{plural(topology.machines, 'machine')} with {plural(topology.devices, 'device')} each"


def _events(timelines: Mapping[str, Timeline], band: Band) -> str:
    """The timelines in one file for Perfetto."""
    suffix = ", estimated" if band.estimated else ""
    found = [timeline_events(each, number, name + suffix) for number, (name, each) in enumerate(timelines.items())]
    events = [event for record in found for event in record["traceEvents"]]
    return json.dumps({**found[0], "traceEvents": events})
