"""The verb ``plan``: the best plan for a model on a machine, whether it pays, and where else compression pays."""

from __future__ import annotations

import argparse
import json
import shlex
from dataclasses import replace
from functools import partial

from gckernels.sync.accuracy.accuracy import start_step
from gckernels.sync.plans.plan import PlanError
from gckernels.sync.traces.model_trace import ModelTrace

from ..choice import Choice, choose, policy_of
from ..drafts.problem import Problem, ProblemError
from ..drafts.rounds import UpdateRounds
from ..machines.machine import MachineError
from .common.caveats import Caveats
from .common.console import Console
from .common.files import STANDARD, add_outputs, reading
from .common.inputs import (
    accuracy_of,
    add_problem,
    check_pictures,
    machine_of,
    methods_of,
    problem_of,
    problem_of_rounds,
    trace_of,
    why_unusable,
    with_sizes_of,
)
from .common.outcome import Exit, Outcome, wrong_use
from .studies.advice import Advice
from .studies.prediction import predict
from .studies.sweeps import sweep_from
from .studies.updates import step_costs, updates_instead
from .texts.pictures import draw_sweeps
from .texts.plan_text import parts
from .texts.use_text import use_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gckernels plan``."""
    parser.description = (
        "Choose for every gradient whether and how to compress it, and say what that gains. The step of every policy "
        "is predicted on the same timeline. With --sweep also say where compression pays: over the values of sweeps, "
        "up to which bandwidth, and which ratio of compression would be enough. With --every the plan is for "
        "sync.Updates, and times of policies are those of rounds. Exit code 1 says that compression does not pay; the "
        "plan of auto then averages exactly."
    )
    parser.epilog = "example: gckernels plan bert espresso-nvlink -o plan.json --sweep bandwidth=1gbit:100gbit"
    add_problem(parser)
    help_ = "the policy that chooses the plan, or all:SPEC for one compressor everywhere (default: auto)"
    parser.add_argument("--policy", default="auto", metavar="NAME", help=help_)
    parser.add_argument(
        "--weights",
        metavar="SPEC",
        help="gather the parameters of a model of fully_shard over all ranks with this compressor, as attach(weights=)",
    )
    parser.add_argument(
        "--every",
        type=int,
        metavar="H",
        help="plan for sync.Updates(every=H), which averages the updates of H steps of a bare module",
    )
    parser.add_argument(
        "--delay", type=int, metavar="D", help="with --every: D steps are computed while updates are on their way"
    )
    parser.add_argument(
        "--steps",
        type=int,
        metavar="N",
        help="steps of the whole training; aggressive compressors begin after a tenth of them",
    )
    parser.add_argument(
        "--sweep",
        nargs="*",
        metavar="NAME=VALUES",
        help="bandwidth=100mbit:100gbit, machines=2,4,8, batch=0.5,1,2 (times that of the trace), encode=1,2,4 (times "
        "the speed of codecs); LOW:HIGH is a range of values; without values the limits alone",
    )
    parser.add_argument("--png", metavar="FILE", help="draw the sweeps; needs matplotlib")
    add_outputs(parser, "the plan")


def run(given: argparse.Namespace, console: Console) -> Outcome:
    """Choose the plan."""
    try:
        policy_of(given.policy)
    except ProblemError as error:
        raise wrong_use(f"--{error}", "leave it out for auto") from None
    sweeps = list(map(sweep_from, given.sweep or ()))
    if given.png is not None and not sweeps:
        raise wrong_use("--png draws sweeps, and there are none", "add --sweep bandwidth=100mbit:100gbit")
    check_pictures(given.png)
    first_step = _start_step_of(given)
    trace, machine = trace_of(given.trace), machine_of(given.machine)
    problem, caveats = problem_of(given, trace, machine, given.weights, _rounds_of(given, trace))
    caveats.check(given.machine)
    with reading(given.trace, "trace", (PlanError,)), reading(given.machine, "machine", (MachineError,)):
        here = Advice.of(problem, _chosen(problem, given.policy, caveats))
        steps = step_costs(problem, here.choice)
        elsewhere = None if given.sweep is None else predict(problem, here, sweeps, console.progress)
        least_s = min(row.step_s for row in here.choice.rows)
        instead = updates_instead(problem, least_s, partial(problem_of_rounds, given, trace, machine))
    plan = replace(here.choice.plan, start_step=first_step)
    if problem.frontend.replicates:
        plan = with_sizes_of(trace, plan)
    files: dict[str | None, str | bytes] = {given.output: json.dumps(plan.to_json(), indent=1) + "\n"}
    if given.png is not None and elsewhere is not None:
        files[given.png] = draw_sweeps(elsewhere.sweeps)
    notes = caveats.lines()
    if given.output not in (None, STANDARD):
        notes.append(use_of(given.output, problem))
    code = Exit.OK if here.pays else Exit.DOES_NOT_PAY
    return Outcome(parts(problem, caveats, here, steps, elsewhere, instead), files, notes, code)


def _start_step_of(given: argparse.Namespace) -> int:
    """The first step that is compressed. Updates need no exact beginning."""
    if given.every is not None:
        if given.steps is not None:
            raise wrong_use("--steps says when compressors of gradients begin, those of updates begin at once")
        return 0
    if given.steps is not None and given.steps < 1:
        raise wrong_use(f"--steps must be an integer from 1 up, got {given.steps}", "give those of the whole training")
    accuracy = accuracy_of(given)
    if accuracy == "aggressive" and given.steps is None:
        begin = "its compressors begin after a tenth of the training, whose number of steps is not known"
        raise wrong_use(
            f"--accuracy aggressive: {begin}", "add --steps, such as --steps 10000, or leave --accuracy out"
        )
    return start_step(accuracy, given.steps)


def _rounds_of(given: argparse.Namespace, trace: ModelTrace) -> UpdateRounds | None:
    """The rounds of ``sync.Updates``; ``None`` if gradients are averaged."""
    if given.every is None:
        if given.delay is not None:
            raise wrong_use("--delay is for rounds of sync.Updates", "add --every")
        return None
    try:
        return UpdateRounds(trace, given.every, given.delay or 0)
    except ValueError as error:
        raise wrong_use(f"--{error}", "both are those of sync.Updates") from None


def _chosen(problem: Problem, policy: str, caveats: Caveats) -> Choice:
    """The plan of a policy beside those of others, or a refusal that says why it has none."""
    try:
        return choose(problem, policy)
    except ProblemError as error:
        spec = policy.removeprefix("all:")
        if spec == policy:
            raise wrong_use(f"--policy {error}", "choose another one, or leave it out for auto") from None
        (method,) = methods_of([spec])
        if (why := why_unusable(method, problem)) is not None:
            unusable = f"no gradient of {problem.trace.model} may use it: {why}"
            raise wrong_use(f"--policy {policy}: {unusable}", "choose another one") from None
        caveats.check_price(method)
        raise wrong_use(f"--{error}", f"--compressors {shlex.quote(spec)} allows it, whatever its error is") from None
