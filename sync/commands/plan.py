"""The verb ``plan``: the best plan for a model on a machine, and whether it pays."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

from ..planner.choice import choose
from .common.console import Console
from .common.error_bars import Band
from .common.files import write
from .common.inputs import (
    add_constraints,
    add_policy,
    add_trace_and_machine,
    check_one_stdin,
    check_policy,
    planning,
    posed,
    start_step_of,
)
from .common.outcome import Exit, wrong_use
from .studies.advice import advise
from .studies.memory import PlanMemory
from .texts.plan_text import compressors_lines, head, plan_line, policies_table, record
from .verbs import add_json_argument, add_output_argument


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gckernels plan``."""
    parser.description = (
        "Choose for every gradient whether and how to compress it, and say what that gains. The step of every policy "
        "is predicted on the same timeline. Exit code 1 says that compression does not pay; the plan of auto then "
        "averages all gradients exactly."
    )
    parser.epilog = "example: gckernels plan bert espresso-nvlink -o plan.json"
    add_trace_and_machine(parser)
    add_policy(parser)
    add_constraints(parser)
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="steps of the whole training; aggressive compressors begin after a tenth of them",
    )
    add_output_argument(parser, "the plan")
    add_json_argument(parser)


def run(given: argparse.Namespace, console: Console) -> Exit:
    """Choose the plan."""
    check_one_stdin(given.trace, given.machine)
    check_policy(given.policy)
    if given.policy == "bound" and given.output is not None:
        raise wrong_use("--policy bound is a limit, with codecs that cost nothing, and no plan to use", "leave out -o")
    start_step = start_step_of(given)
    problem, caveats = posed(given)
    with planning(given, problem.trace):
        choice = choose(problem, given.policy)
    band, plan = Band.of(problem.machine, problem.trace), replace(choice.plan, start_step=start_step)
    memory = PlanMemory.of(problem, plan)
    advice = advise(choice, band, memory)
    if given.output is not None:
        write(given.output, json.dumps(plan.to_json(), indent=1) + "\n")
        console.note(f"{given.output} is written")
    lines = [head(problem), *compressors_lines(problem, caveats), "", policies_table(choice, band), *band.notes(), ""]
    lines += [plan_line(choice.policy, plan, problem.topology.world_size), memory.line(), advice.text]
    console.show("\n".join(lines))
    for line in caveats.lines():
        console.note(line)
    console.record(record(problem, choice, band, advice) | memory.record() | caveats.record())
    return Exit.OK if advice.pays else Exit.DOES_NOT_PAY
