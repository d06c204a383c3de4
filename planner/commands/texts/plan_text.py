"""Chosen plans, and where compression pays, for people and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict

from gckernels.sync.accuracy.accuracy import error_on
from gckernels.sync.plans.names import short_spec, summary_of
from gckernels.sync.plans.numbers import duration, plural, rate, three_digits, volume, whole_percent
from gckernels.sync.programs.steps import Place

from ...choice import Choice, Row
from ...drafts.problem import Problem
from ...machines.published import ON_DEVICE, SLOWER
from ..common.caveats import Band, Caveats
from ..common.outcome import BLANK, Part
from ..common.tables import table
from ..studies.advice import Advice
from ..studies.prediction import HIGH_BIT_PER_S, LOW_BIT_PER_S, NEAR, Elsewhere, SweepResult
from ..studies.sweeps import software_limit
from ..studies.updates import NO_UPDATES, StepCost, UpdatesInstead


def parts(
    problem: Problem,
    caveats: Caveats,
    here: Advice,
    steps: Sequence[StepCost],
    elsewhere: Elsewhere | None,
    instead: UpdatesInstead | None,
) -> list[Part]:
    """Everything that ``gckernels plan`` says; times are in seconds in JSON."""
    choice = here.choice
    units = f"{plural(len(choice.plan.units), 'unit')}: {summary_of(choice.plan, problem.topology.world_size)}"
    published = _published_line(problem, choice)
    found = [
        _head(problem),
        _compressors(problem, caveats),
        BLANK,
        _policies(choice, here.band),
        here.band.part(),
        *([] if published is None else [Part(published)]),
        BLANK,
        *_steps(problem, steps),
        *([] if elsewhere is None else _elsewhere(problem, here, elsewhere)),
        Part(f"The plan of {choice.policy} has {units}."),
        here.memory.part(),
        Part(here.text, here.record() | {"advice": here.text}),
    ]
    return [*found, NO_UPDATES if instead is None else instead.part()]


def _head(problem: Problem) -> Part:
    """A sentence about the inputs."""
    trace, step, topology = problem.trace, problem.step, problem.topology
    rest = duration(step.forward_s + step.optimizer_s) if step.is_whole_step else "not known"
    averaged = problem.frontend.traits.launched_in if problem.rounds is None else "sync.Updates"
    ranks = f"{plural(topology.world_size, 'rank')} ({topology.machines} x {topology.devices})"
    weights = "" if problem.weights is None else f" Parameters are gathered by {short_spec(problem.weights)}."
    line = (
        f"{trace.model} on {problem.machine.name}, {ranks}: {plural(len(trace.tensors), 'tensor')}, "
        f"{volume(trace.nbytes)}, backward {duration(step.backward_s)}, forward and optimizer {rest}. "
        f"For {averaged}.{weights}"
    )
    record = {
        "model": trace.model,
        "machine": problem.machine.name,
        "topology": {"machines": topology.machines, "devices": topology.devices},
        "frontend": problem.frontend.value,
        "weights": None if problem.weights is None else short_spec(problem.weights),
    }
    return Part(line, record)


def _compressors(problem: Problem, caveats: Caveats) -> Part:
    """Sentences about the compressors that may be used, about those that were named and cannot be, and about those
    whose errors were not measured."""
    specs, assumed = list(map(short_spec, problem.compressors)), _assumed_errors(problem)
    lines = [f"Allowed compressors: {', '.join(specs) or 'none; only programs are chosen'}."]
    lines += [f"No gradient may use {spec}: {why}." for spec, why in caveats.unusable.items()]
    if assumed:
        lines.append(f"Errors are assumed, as on synthetic gradients, where the trace has none: {', '.join(assumed)}.")
    return Part("\n".join(lines), {"allowed": specs, "assumed_errors": assumed} | caveats.record())


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


def _published_line(problem: Problem, choice: Choice) -> str | None:
    """A sentence about the published system whose plan is chosen, if it was measured to be slower."""
    if choice.policy == "byteps" and Place.HOST not in problem.places:
        return ON_DEVICE
    return SLOWER[choice.policy].line() if choice.policy in SLOWER and problem.machine.estimated else None


def _policies(choice: Choice, band: Band) -> Part:
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
    keys = ("policy", "step_s", "exposed_s", "error", "found_s", "margin")
    record = [{key: getattr(row, key) for key in keys} for row in choice.rows]
    return Part(table(choice.rows, columns), {"policies": record})


def _steps(problem: Problem, steps: Sequence[StepCost]) -> list[Part]:
    """A table of training steps where updates are averaged: time, speed-up, and bits that are sent."""
    if problem.rounds is None:
        return []
    plain_s = steps[0].step_s
    columns: dict[str, Callable[[StepCost], str]] = {
        "training step": lambda step: step.name,
        "time": lambda step: duration(step.step_s),
        "vs DDP": lambda step: f"{plain_s / step.step_s:.2f}" if step.step_s else "",
        "bits sent per element": lambda step: three_digits(step.sent_bits),
    }
    rounds = {"every": problem.rounds.every, "delay": problem.rounds.delay}
    return [Part(table(steps, columns), {"rounds": rounds, "training_steps": list(map(asdict, steps))}), BLANK]


# -------------------------------------------------------------------- elsewhere


def _elsewhere(problem: Problem, here: Advice, found: Elsewhere) -> list[Part]:
    """A table for each sweep, and sentences about limits, with empty lines behind them."""
    lines, sweeps = [], []
    for result in found.sweeps:
        lines += [_sweep_table(result, "best" if here.of_all else here.choice.policy), ""]
        points = [point.record() for point in result.points]
        sweeps.append({"name": result.sweep.name, "values": result.sweep.values, "points": points})
    if not here.band.estimated and any(point.band.estimated for result in found.sweeps for point in result.points):
        lines += ["What differs from the measured machine is estimated, +-25 %.", ""]
    limits = {"limit": found.limit and asdict(found.limit), "enough": found.enough and asdict(found.enough)}
    text = "\n".join(_limits(problem, here, found))
    return [Part("\n".join(lines) if lines else None, {"sweeps": sweeps}), Part(text, limits), BLANK]


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
