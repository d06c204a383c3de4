"""The verb ``explain``: why a plan takes as long as it does, and what each of its choices is worth."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping

from ..planner.machines.machine import MachineError
from ..planner.timeline.events import timeline_events
from ..planner.timeline.timeline import Timeline
from ..plans.plan import Frontend, PlanError
from .common.console import Console
from .common.error_bars import Band
from .common.files import write
from .common.inputs import (
    add_constraints,
    add_trace_and_machine_options,
    check_one_stdin,
    check_pictures,
    machine_of,
    plan_of,
    problem_of,
    trace_of,
)
from .common.kinds import MAKE_MACHINE, MAKE_PLAN
from .common.outcome import Exit, bad_data, wrong_use
from .studies import explanation
from .studies.memory import PlanMemory
from .texts import explanation_text
from .texts.pictures import draw_timelines, png_of
from .verbs import add_json_argument, add_output_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gckernels explain``."""
    parser.description = (
        "Say why a plan takes as long as it does: what each message costs, how the step would change if it were sent "
        "in another way, what the step waits for, and what faster links or free codecs would give. The largest "
        "messages are tried in other ways; --unit tries one unit."
    )
    parser.add_argument("plan", metavar="PLAN", help="file of gckernels plan; - is stdin")
    add_trace_and_machine_options(parser)
    parser.add_argument("--unit", metavar="NAME", help="explain one unit or parameter instead of all messages")
    parser.add_argument(
        "--messages", type=int, default=8, metavar="N", help="try N messages in other ways (default: 8)"
    )
    parser.add_argument("--against", metavar="PLAN", help="compare with this plan, also in the picture")
    parser.add_argument("--png", metavar="FILE", help="draw lanes and links over time; needs matplotlib")
    parser.add_argument("--perfetto", metavar="FILE", help="write the timeline for ui.perfetto.dev")
    add_constraints(parser)
    add_output_argument(parser, "the explanation as JSON")
    add_json_argument(parser)


def run(given: argparse.Namespace, console: Console) -> Exit:
    """Explain the plan."""
    _check(given)
    plans = {path: plan_of(path) for path in filter(None, (given.plan, given.against))}
    plan, trace, machine = plans[given.plan], trace_of(given.trace), machine_of(given.machine)
    for path, each in plans.items():
        explanation.check_model(path, each, trace)
    if plan.made_for is not None:
        given.frontend = _frontend(given, plan.made_for)
    problem, caveats = problem_of(given, trace, machine)
    band = Band.of(machine, trace)
    try:
        for path, each in plans.items():
            explanation.check_fit(path, each, problem)
        for line in explanation.differences(plan, problem):
            console.note(f"{given.plan}: {line}")
        timelines = {path: explanation.judged(problem, each) for path, each in plans.items()}
        if given.unit is None:
            found = explanation.explain(problem, plan, given.messages, console.progress)
            text = explanation_text.text(given.plan, found, band)
            record = explanation_text.record(found, band)
        else:
            step_s, rows = timelines[given.plan].step_s, explanation.explain_unit(problem, plan, given.unit)
            text = explanation_text.unit_text(given.unit, step_s, rows, band)
            messages = list(map(explanation_text.message_record, rows))
            record = {"step_s": step_s, **band.record(), "messages": messages}
    except PlanError as error:
        raise wrong_use(f"{given.plan}: {error}", "gckernels explain without --unit lists the units") from None
    except MachineError as error:
        raise bad_data(f"{given.machine}: {error}", MAKE_MACHINE) from None
    if given.against is not None:
        text += "\n\n" + explanation_text.comparison(timelines, plans, band)
        record["against"] = explanation_text.timeline_record(timelines[given.against])
    memory = PlanMemory.of(problem, plan)
    record |= memory.record() | caveats.record()
    _write_files(given, timelines, record, band, console)
    too_large = [] if memory.fits else [f"{given.plan} does not fit. {memory.why_not}"]
    console.show("\n".join([text, "", memory.line(), *too_large, *band.notes()]))
    for line in caveats.lines():
        console.note(line)
    console.record(record)
    return Exit.OK


def _frontend(given: argparse.Namespace, made_for: Frontend) -> str:
    """The way to attach a plan that can be frontend in one way only."""
    if given.frontend not in (None, made_for.value):
        raise wrong_use(f"--frontend {given.frontend}: {given.plan} is for {made_for.value}", "leave it out")
    return made_for.value


def _check(given: argparse.Namespace) -> None:
    """Refuse arguments that are wrong whatever the files are."""
    check_one_stdin(given.plan, given.trace, given.machine, given.against or "")
    check_pictures(given.png)
    if given.messages < 0:
        raise wrong_use(f"--messages must be 0 or more, got {given.messages}", "leave it out for 8")
    if given.against == given.plan:
        raise wrong_use(f"--against must be another plan than {given.plan}", MAKE_PLAN)


def _write_files(
    given: argparse.Namespace, timelines: Mapping[str, Timeline], record: object, band: Band, console: Console
) -> None:
    """Write the explanation, the picture and the file for Perfetto, after all of them have been made."""
    makers: dict[str, Callable[[], str | bytes]] = {}
    if given.png is not None:
        makers[given.png] = lambda: png_of(draw_timelines(timelines, band))
    if given.perfetto is not None:
        suffix = ", estimated" if band.estimated else ""
        found = [timeline_events(each, number, name + suffix) for number, (name, each) in enumerate(timelines.items())]
        events = [event for record in found for event in record["traceEvents"]]
        makers[given.perfetto] = lambda: json.dumps({**found[0], "traceEvents": events})
    contents: dict[str, str | bytes] = {path: make() for path, make in makers.items()}
    if given.output is not None:
        contents[given.output] = json.dumps(record, indent=1, allow_nan=False) + "\n"
    for path, content in contents.items():
        write(path, content)
        console.note(f"{path} is written")
