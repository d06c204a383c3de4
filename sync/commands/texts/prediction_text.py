"""Predictions as text for people and as JSON."""

from __future__ import annotations

from typing import Any

from ...planner.drafts.problem import Problem
from ...plans.numbers import duration, rate, three_digits, whole_percent
from ..common.caveats import Caveats
from ..common.tables import table
from ..studies.advice import DO_NOT, advise
from ..studies.crossover import HIGH_BIT_PER_S, LOW_BIT_PER_S, NEAR
from ..studies.prediction import Predictions, SweepPoint, SweepResult
from ..studies.sweeps import software_limit
from .plan_text import assumed_errors, compressors_lines, head


def text(problem: Problem, found: Predictions, caveats: Caveats) -> str:
    """All predictions as text."""
    band = found.here.band
    parts = [head(problem), *compressors_lines(problem, caveats), "", found.here.memory.line(), advice_of(found.here)]
    for result in found.sweeps:
        parts += ["", sweep_table(result)]
    if not band.estimated and any(point.band.estimated for result in found.sweeps for point in result.points):
        parts.append("What differs from the measured machine is estimated, +-25 %.")
    parts += ["", *limits(problem, found)]
    if found.closed_forms:
        parts += ["", closed_forms_table(found)]
    notes = band.notes()
    return "\n".join([*parts, *(["", *notes] if notes else [])])


def advice_of(point: SweepPoint) -> str:
    """The advice as a sentence."""
    return advise(point.choice, point.band, point.memory).text


def sweep_table(result: SweepResult) -> str:
    """A table of a sweep, with a row for each value."""
    axis = result.sweep.axis
    rows = [
        (
            axis.label(value),
            duration(point.choice.none.step_s),
            duration(point.choice.row.step_s),
            f"{point.gain:.2f}",
            _advice(point),
        )
        for value, point in zip(result.sweep.values, result.points, strict=True)
    ]
    return table((result.sweep.name, "none", "best", "vs none", "advice"), rows, left=(4,))


def _advice(point: SweepPoint) -> str:
    if point.pays:
        return "free codecs would pay" if point.choice.is_limit else "compress"
    if not point.memory.fits:
        return f"{DO_NOT}; it does not fit"
    return f"{DO_NOT}; an exact plan pays" if point.choice.pays else DO_NOT


def limits(problem: Problem, found: Predictions) -> list[str]:
    """Sentences about the bandwidth up to which compression pays, and about the ratio that would be enough."""
    if found.limit is None or found.ratio is None:
        return ["One rank sends nothing, so there is nothing to compress."]
    limit, ratio = found.limit, found.ratio
    if limit.bit_per_s is not None:
        lines = [f"Compression pays up to {rate(limit.bit_per_s)} between machines, and not above."]
    elif limit.pays:
        lines = [f"Compression pays at every bandwidth up to {rate(HIGH_BIT_PER_S)}."]
    else:
        lines = [f"Compression pays at no bandwidth from {rate(LOW_BIT_PER_S)} up."]
    if (most := software_limit(problem.machine)) is not None:
        lines.append(f"Software gets {rate(most)} through a link of {problem.machine.name}, whatever its bandwidth.")
    least = f"{whole_percent(NEAR - 1)} above {duration(ratio.least_s)}, the least however few bytes are sent"
    takes = found.here.band.takes
    if ratio.ratio == 1.0:
        lines.append(f"No ratio of compression is needed here: {takes} at most {least}.")
    else:
        enough = f"{three_digits(ratio.ratio)} times fewer bytes would be enough here"
        lines.append(f"{enough}: then {takes} at most {least}.")
    return lines


def closed_forms_table(found: Predictions) -> str:
    """A table of the closed forms beside the timeline: backward and synchronisation, without forward and optimizer."""
    rows = [
        (
            row.name,
            duration(row.closed.step_s),
            duration(row.timeline_s),
            f"{row.difference * 100:+.0f} %",
            row.why or "they agree",
        )
        for row in found.closed_forms
    ]
    return table(("backward and sync", "closed form", "timeline", "differs", "why"), rows, left=(0, 4))


def record(problem: Problem, found: Predictions) -> dict[str, Any]:
    """All predictions as JSON; times are in seconds."""
    limit, ratio = found.limit, found.ratio
    return {
        "model": problem.trace.model,
        "machine": problem.machine.name,
        "assumed_errors": assumed_errors(problem),
        "advice": advice_of(found.here),
        "here": point_record(found.here),
        "sweeps": [
            {
                "name": result.sweep.name,
                "values": list(result.sweep.values),
                "points": [point_record(point) for point in result.points],
            }
            for result in found.sweeps
        ],
        "limit": None if limit is None else {"bandwidth_bit_per_s": limit.bit_per_s, "always_pays": limit.pays},
        "enough": None if ratio is None else {"ratio": ratio.ratio, "step_s": ratio.step_s, "least_s": ratio.least_s},
        "closed_forms": [
            {
                "name": row.name,
                "closed_form_s": row.closed.step_s,
                "timeline_s": row.timeline_s,
                "why": row.why,
            }
            for row in found.closed_forms
        ],
    }


def point_record(point: SweepPoint) -> dict[str, Any]:
    """A prediction as JSON."""
    return {
        "none_s": point.choice.none.step_s,
        "step_s": point.choice.row.step_s,
        "policy": point.choice.policy,
        "pays": point.pays,
        "compresses": point.compresses,
        **point.band.record(),
        **point.memory.record(),
    }
