"""Chosen plans, and where compression pays, as text for people and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from gckernels.sync.accuracy.accuracy import error_on
from gckernels.sync.plans.names import short_spec, summary_of
from gckernels.sync.plans.numbers import duration, plural, rate, three_digits, volume, whole_percent
from gckernels.sync.programs.steps import Place

from ...choice import Choice, Row
from ...drafts.problem import Problem
from ...machines.published import ON_DEVICE, SLOWER
from ..common.caveats import Band, Caveats
from ..common.tables import table
from ..studies.advice import Advice
from ..studies.prediction import HIGH_BIT_PER_S, LOW_BIT_PER_S, NEAR, Elsewhere, SweepResult
from ..studies.sweeps import software_limit
from ..studies.updates import StepCost, UpdatesInstead


def text(
    problem: Problem,
    caveats: Caveats,
    here: Advice,
    steps: Sequence[StepCost],
    elsewhere: Elsewhere | None,
    instead: UpdatesInstead | None,
) -> str:
    """Everything that ``gckernels plan`` says."""
    choice, band = here.choice, here.band
    lines = [
        _head(problem),
        *_compressors_lines(problem, caveats),
        "",
        _policies_table(choice, band),
        *band.notes(),
        *_published_lines(problem, choice),
        "",
    ]
    if steps:
        lines += [_steps_table(steps), ""]
    if elsewhere is not None:
        lines += _elsewhere_lines(problem, here, elsewhere)
    units = f"{plural(len(choice.plan.units), 'unit')}: {summary_of(choice.plan, problem.topology.world_size)}"
    lines += [f"The plan of {choice.policy} has {units}.", here.memory.line(), here.text]
    return "\n".join(lines if instead is None else [*lines, instead.line()])


def _head(problem: Problem) -> str:
    """A sentence about the inputs."""
    trace, step, topology = problem.trace, problem.step, problem.topology
    rest = duration(step.forward_s + step.optimizer_s) if step.is_whole_step else "not known"
    averaged = problem.frontend.traits.launched_in if problem.rounds is None else "sync.Updates"
    ranks = f"{plural(topology.world_size, 'rank')} ({topology.machines} x {topology.devices})"
    weights = "" if problem.weights is None else f" Parameters are gathered by {short_spec(problem.weights)}."
    return (
        f"{trace.model} on {problem.machine.name}, {ranks}: {plural(len(trace.tensors), 'tensor')}, "
        f"{volume(trace.nbytes)}, backward {duration(step.backward_s)}, forward and optimizer {rest}. "
        f"For {averaged}.{weights}"
    )


def _compressors_lines(problem: Problem, caveats: Caveats) -> list[str]:
    """Sentences about the compressors that may be used, about those that were named and cannot be, and about those
    whose errors were not measured."""
    specs = ", ".join(map(short_spec, problem.compressors)) or "none; only programs are chosen"
    lines = [f"Allowed compressors: {specs}."]
    lines += [f"No gradient may use {spec}: {why}." for spec, why in caveats.unusable.items()]
    if assumed := _assumed_errors(problem):
        lines.append(f"Errors are assumed, as on synthetic gradients, where the trace has none: {', '.join(assumed)}.")
    return lines


def _assumed_errors(problem: Problem) -> list[str]:
    """The specs of allowed compressors whose errors the trace does not have for all of their gradients."""
    tensors, found = problem.trace.tensors, []
    for compressor in problem.compressors:
        spec = str(compressor)  # as a recorded trace writes it
        unknown = [tensors[number] for number in problem.users[compressor] if spec not in tensors[number].errors]
        errors = (error_on(tensor, compressor) for tensor in unknown)
        if any(error is None or error.assumed for error in errors):
            found.append(short_spec(compressor))
    return found


def _published_lines(problem: Problem, choice: Choice) -> list[str]:
    """A sentence about the published system whose plan is chosen, if it was measured to be slower."""
    if choice.policy == "byteps" and Place.HOST not in problem.places:
        return [ON_DEVICE]
    return [SLOWER[choice.policy].line()] if choice.policy in SLOWER and problem.machine.estimated else []


def _policies_table(choice: Choice, band: Band) -> str:
    """A table of all policies: step, speed-up, time that backward does not hide, relative error of the gradients, and
    seconds of the search."""
    none_s = choice.none.step_s
    columns: dict[str, Callable[[Row], str]] = {
        "policy": lambda row: row.policy,
        band.column: lambda row: duration(row.step_s),
        "vs none": lambda row: f"{none_s / row.step_s:.2f}" if row.step_s else "",
        "exposed": lambda row: duration(row.exposed_s),
        "error": lambda row: "0" if not row.error else three_digits(row.error),
        "found in": lambda row: duration(row.found_s),
    }
    return table(choice.rows, columns)


def _steps_table(steps: Sequence[StepCost]) -> str:
    """A table of training steps: time, speed-up, and bits that are sent."""
    plain_s = steps[0].step_s
    columns: dict[str, Callable[[StepCost], str]] = {
        "training step": lambda step: step.name,
        "time": lambda step: duration(step.step_s),
        "vs DDP": lambda step: f"{plain_s / step.step_s:.2f}" if step.step_s else "",
        "bits sent per element": lambda step: three_digits(step.sent_bits),
    }
    return table(steps, columns)


# -------------------------------------------------------------------- elsewhere


def _elsewhere_lines(problem: Problem, here: Advice, found: Elsewhere) -> list[str]:
    """A table for each sweep, and sentences about limits, with empty lines behind them."""
    lines = []
    for result in found.sweeps:
        lines += [_sweep_table(result, "best" if here.of_all else here.choice.policy), ""]
    if not here.band.estimated and any(point.band.estimated for result in found.sweeps for point in result.points):
        lines += ["What differs from the measured machine is estimated, +-25 %.", ""]
    return [*lines, *_limits(problem, here, found), ""]


def _sweep_table(result: SweepResult, plan: str) -> str:
    """A table of a sweep, with a row for each value, in which the steps are those of a plan."""
    columns: dict[str, Callable[[tuple[float, Advice]], str]] = {
        result.sweep.name: lambda row: result.sweep.axis.label(row[0]),
        "none": lambda row: duration(row[1].choice.none.step_s),
        plan: lambda row: duration(row[1].choice.row.step_s),
        "vs none": lambda row: f"{row[1].gain:.2f}",
        "advice": lambda row: row[1].short,
    }
    return table(zip(result.sweep.values, result.points, strict=True), columns, left=(4,))


def _limits(problem: Problem, here: Advice, found: Elsewhere) -> list[str]:
    """Sentences about the bandwidth up to which compression pays, and about the ratio that would be enough."""
    if found.limit is None or found.enough is None:
        return ["One rank sends nothing, so there is nothing to compress."]
    pays = "Compression pays" if here.of_all else f"Compression by {here.choice.policy} pays"
    if (bit_per_s := found.limit.bandwidth_bit_per_s) is not None:
        lines = [f"{pays} up to {rate(bit_per_s)} between machines, and not above."]
    elif found.limit.always_pays:
        lines = [f"{pays} at every bandwidth up to {rate(HIGH_BIT_PER_S)}."]
    else:
        lines = [f"{pays} at no bandwidth from {rate(LOW_BIT_PER_S)} up."]
    if (most := software_limit(problem.machine)) is not None:
        lines.append(f"Software gets {rate(most)} through a link of {problem.machine.name}, whatever its bandwidth.")
    least_s = duration(found.enough.least_s)
    least = f"{here.band.takes} at most {whole_percent(NEAR - 1)} above {least_s}, the least however few bytes are sent"
    if found.enough.ratio == 1.0:
        return [*lines, f"No ratio of compression is needed here: {least}."]
    return [*lines, f"{three_digits(found.enough.ratio)} times fewer bytes would be enough here: then {least}."]


# -------------------------------------------------------------------- JSON


def record(
    problem: Problem,
    here: Advice,
    steps: Sequence[StepCost],
    elsewhere: Elsewhere | None,
    instead: UpdatesInstead | None,
) -> dict[str, Any]:
    """The choice as JSON; times are in seconds."""
    columns = ("policy", "step_s", "exposed_s", "error", "found_s", "margin")
    found = {
        "model": problem.trace.model,
        "machine": problem.machine.name,
        "topology": {"machines": problem.topology.machines, "devices": problem.topology.devices},
        "frontend": problem.frontend.value,
        "weights": None if problem.weights is None else short_spec(problem.weights),
        "allowed": list(map(short_spec, problem.compressors)),
        "assumed_errors": _assumed_errors(problem),
        "advice": here.text,
        "updates_instead": None if instead is None else instead.record(),
        "policies": [{name: getattr(row, name) for name in columns} for row in here.choice.rows],
    }
    if problem.rounds is not None:
        found["rounds"] = {"every": problem.rounds.every, "delay": problem.rounds.delay}
        found["training_steps"] = list(map(asdict, steps))
    return found | here.record() | ({} if elsewhere is None else elsewhere.record())
