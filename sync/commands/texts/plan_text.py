"""Choices of plans as text for people and as JSON."""

from __future__ import annotations

from typing import Any

from ...accuracy.accuracy import error_on
from ...planner.choice import Choice
from ...planner.drafts.problem import Problem
from ...plans.names import short_spec, summary_of
from ...plans.numbers import duration, plural, three_digits, volume
from ...plans.plan import Frontend, Plan
from ..common.caveats import Caveats
from ..common.error_bars import Band
from ..common.tables import table
from ..studies.advice import Advice, compresses

_FRONTENDS = {Frontend.DDP: "a DDP model's buckets", Frontend.MODULE: "a bare module"}


def head(problem: Problem) -> str:
    """A sentence about the inputs."""
    trace, topology = problem.trace, problem.topology
    nbytes = sum(tensor.numel * tensor.dtype.itemsize for tensor in trace.tensors)
    rest = duration(trace.forward_s + trace.optimizer_s) if trace.is_whole_step else "not known"
    ranks = f"{plural(topology.world_size, 'rank')} ({topology.machines} x {topology.devices})"
    return (
        f"{trace.model} on {problem.machine.name}, {ranks}: {plural(len(trace.tensors), 'tensor')}, "
        f"{volume(nbytes)}, backward {duration(trace.backward_s)}, forward and optimizer {rest}. "
        f"For {_FRONTENDS[problem.frontend]}."
    )


def compressors_lines(problem: Problem, caveats: Caveats) -> list[str]:
    """Sentences about the compressors that may be used, about those that were named and cannot be, and about those
    whose errors were not measured."""
    specs = ", ".join(map(short_spec, problem.compressors)) or "none; only programs are chosen"
    lines = [f"Allowed compressors: {specs}."]
    lines += [f"No gradient may use {spec}: {why}." for spec, why in caveats.unusable.items()]
    if assumed := assumed_errors(problem):
        lines.append(f"Errors are assumed, as on synthetic gradients, where the trace has none: {', '.join(assumed)}.")
    return lines


def assumed_errors(problem: Problem) -> list[str]:
    """The specs of allowed compressors whose errors the trace does not have for all of their gradients."""
    tensors, found = problem.trace.tensors, []
    for compressor in problem.compressors:
        spec = str(compressor)  # as a recorded trace writes it
        unknown = [tensors[number] for number in problem.users[compressor] if spec not in tensors[number].errors]
        errors = (error_on(tensor, compressor) for tensor in unknown)
        if any(error is None or error.assumed for error in errors):
            found.append(short_spec(compressor))
    return found


def policies_table(choice: Choice, band: Band) -> str:
    """A table of all policies: step, speed-up, time that backward does not hide, relative error of the gradients, and
    seconds of the search."""
    none_s = choice.none.step_s
    rows = [
        (
            row.policy,
            duration(row.step_s),
            f"{none_s / row.step_s:.2f}" if row.step_s else "",
            duration(row.exposed_s),
            "0" if not row.error else three_digits(row.error),
            duration(row.found_s),
        )
        for row in choice.rows
    ]
    return table(("policy", band.column, "vs none", "exposed", "error", "found in"), rows)


def plan_line(name: str, plan: Plan, world_size: int) -> str:
    """A sentence about a plan: the compressors and programs of its units."""
    return f"The plan of {name} has {plural(len(plan.units), 'unit')}: {summary_of(plan, world_size)}."


def record(problem: Problem, choice: Choice, band: Band, advice: Advice) -> dict[str, Any]:
    """The choice as JSON; times are in seconds."""
    return {
        "model": problem.trace.model,
        "machine": problem.machine.name,
        "topology": {"machines": problem.topology.machines, "devices": problem.topology.devices},
        "frontend": problem.frontend.value,
        "allowed": list(map(short_spec, problem.compressors)),
        "assumed_errors": assumed_errors(problem),
        **band.record(),
        "policy": choice.policy,
        "pays": advice.pays,
        "compresses": compresses(choice.plan),
        "advice": advice.text,
        "policies": [
            {
                "policy": row.policy,
                "step_s": row.step_s,
                "exposed_s": row.exposed_s,
                "error": row.error,
                "found_s": row.found_s,
            }
            for row in choice.rows
        ],
    }
