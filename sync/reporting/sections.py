"""The parts of a report around its pictures: the head, the decisions, one step, the alternatives, the foot."""

from __future__ import annotations

import logging
import statistics
from dataclasses import dataclass

from ..engine.recorded_step import RecordedStep, covered_s
from ..plans.numbers import duration, percent, plural, three_digits, volume, whole_percent
from ..stats.decisions import Decision
from .data import ReportData
from .html import NONE, Markup, bar, details, table, table_row, tag, unbroken

_LAST = 5  # samples whose median is the present time of a step
_MANY = 8  # decisions, which then stand in two columns on large screens


def head(data: ReportData) -> Markup:
    """The head of the page: the result in a sentence, and the figures."""
    figures = [
        tag("div", tag("dt", name), tag("dd", value, tag("small", note) if note else None))
        for name, value, note in _figures(data)
    ]
    return tag(
        "header",
        tag("p", tag("b", "gckernels"), f" {_where(data)}", class_="where"),
        tag("h1", verdict(data)),
        tag("dl", figures, class_="figures"),
        class_="head",
    )


def verdict(data: ReportData) -> str:
    """The result so far, in a sentence."""
    if data.ranks == 1:
        return "One rank has nobody to average with, so nothing is compressed"
    if not data.compresses:
        if data.decisions and data.decisions[-1].policy == "none":
            return "No compression was worth it so far: gradients are averaged as without gckernels"
        return "Nothing is compressed: gradients are averaged as without gckernels"
    factor = speedup(data)
    saved = fewer(1 - data.sent_nbytes / data.plain_nbytes if data.plain_nbytes else 0.0)
    if factor is None:
        return f"Gradients are sent with {saved}"
    measured = (time := step_time(data)) is not None and time.measured
    both = measured and (plain := plain_time(data)) is not None and plain.measured
    how = "are" if both else "are predicted to be"
    if factor < 1:
        return f"Steps {how} {three_digits(1 / factor)} times as slow as without compression, with {saved}"
    return f"Steps {how} {three_digits(factor)} times as fast as without compression, with {saved}"


def fewer(part: float) -> str:
    """A sentence's end about the bytes that are saved; 99.3 % are written with a digit more than 87 %."""
    if part <= 0:
        return "no fewer bytes"
    return f"{whole_percent(part) if part < 0.985 else percent(part)} fewer bytes"


def _where(data: ReportData) -> str:
    return f"{data.model}, {data.averager}, {plural(data.ranks, 'rank')} on {data.device} over {data.backend}"


def _figures(data: ReportData) -> list[tuple[str, str, str]]:
    """The names, values and notes of the figures."""
    step, plain, prediction = step_time(data), plain_time(data), data.prediction
    found = [("Steps so far", f"{data.step:,}" if data.step else NONE, "" if data.step else "none counted")]
    if step is not None:
        found.append(("A step", duration(step.seconds), _kind(step)))
    if plain is not None and data.compresses:
        found.append(("Without compression", duration(plain.seconds), _kind(plain)))
    if data.compresses:
        saved = f"of {volume(data.plain_nbytes)}"
        found.append(("Sent in a step", volume(data.sent_nbytes), saved))
        found.append(("Residuals", volume(data.residual_nbytes), "of memory"))
    else:
        found.append(("Sent in a step", volume(data.plain_nbytes), ""))
    errors = [row.error for row in data.samples if row.error is not None]
    if errors:
        found.append(("Gradient error", three_digits(errors[-1]), "measured"))
    elif prediction is not None and data.compresses:
        found.append(("Gradient error", three_digits(prediction.error), "predicted"))
    return found


def _kind(time: Time) -> str:
    return "measured" if time.measured else "predicted"


@dataclass(frozen=True)
class Time:
    """A time of a step."""

    seconds: float  # the time
    measured: bool  # whether it was measured and not predicted


def step_time(data: ReportData) -> Time | None:
    """The present time of a step: measured in the last steps, or when the plan was decided; else predicted."""
    begun = data.decisions[-1].step if data.decisions else 0
    recent = [row.step_s for row in data.samples if row.step_s is not None and row.step > begun][-_LAST:]
    if recent:
        return Time(statistics.median(recent), True)
    for row in reversed(data.decisions):
        if row.measured_s is not None:
            return Time(row.measured_s, True)
    return None if data.prediction is None else Time(data.prediction.step_s, False)


def plain_time(data: ReportData) -> Time | None:
    """The time of a step without compression, measured or predicted."""
    for row in reversed(data.decisions):
        if row.none_s is not None:
            return Time(row.none_s, True)
    return None if data.prediction is None else Time(data.prediction.none_s, False)


def speedup(data: ReportData) -> float | None:
    """How many times as fast a step is as without compression. Times are compared only if both were obtained alike."""
    step, plain = step_time(data), plain_time(data)
    if step is None or plain is None or not step.seconds or not data.compresses:
        return None
    if step.measured != plain.measured:
        prediction = data.prediction
        return None if prediction is None or not prediction.step_s else prediction.none_s / prediction.step_s
    return plain.seconds / step.seconds


# -------------------------------------------------------------------- decisions


def decisions(data: ReportData) -> Markup:
    """The decisions, numbered as in the pictures."""
    rows = [_decision(number, row) for number, row in enumerate(data.decisions, start=1)]
    return tag("ol", rows, class_="decisions is-many" if len(rows) > _MANY else "decisions")


def _decision(number: int, row: Decision) -> Markup:
    times = (("predicted", row.predicted_s), ("measured", row.measured_s), ("without compression", row.none_s))
    known = [f"{name} {duration(seconds)}" for name, seconds in times if seconds is not None]
    return tag(
        "li",
        tag("span", f"{number}", class_="number", aria_hidden="true"),
        tag("p", tag("b", f"Step {row.step:,}"), f" policy {row.policy}", class_="when"),
        tag("p", unbroken(row.short) or row.text),
        tag("p", " · ".join(known), class_="times") if known else None,
        details("In the log", tag("p", row.text)) if row.short else None,
        id=f"decision-{number}",
        class_="is-warning" if row.level >= logging.WARNING else None,
    )


# -------------------------------------------------------------------- one step


def lanes(step: RecordedStep) -> Markup:
    """A table of the lanes of a recorded step with bars of the time in which they work."""
    rows = []
    for number, name in enumerate(step.lanes):
        stages = [stage for stage in step.stages if stage.lane == number]
        busy_s = covered_s((stage.start_s, stage.end_s) for stage in stages)
        sent_nbytes = sum(stage.sent_nbytes for stage in stages)
        cells = (
            bar(("behind", step.end_s), ("chosen", busy_s), most=step.end_s),
            duration(busy_s),
            f"{len(stages):,}",
            volume(sent_nbytes) if sent_nbytes else NONE,
        )
        rows.append(table_row(name, cells))
    note = tag("p", "record_timeline writes a file with every stage of all ranks, for ui.perfetto.dev.", class_="note")
    return tag("div", table(("lane", "", "works", "stages", "sent"), rows, class_="bars"), note)


def step_sentence(step: RecordedStep, plan_fingerprint: str) -> str:
    """A sentence about the share of sending in a recorded step.

    Args:
        plan_fingerprint: the fingerprint of the plan that runs now.
    """
    sending_s = covered_s((stage.start_s, stage.end_s) for stage in step.stages if stage.category == "communicate")
    whose = "" if step.plan_fingerprint == plan_fingerprint else ", of a plan that ran before"
    return (
        f"Step {step.step:,}{whose}. From the first gradient to the last mean it took {duration(step.end_s)}, and "
        f"something was sent for {duration(sending_s)}. Backward hid {duration(step.hidden_s)} of the sending; "
        f"after it, training waited for {duration(step.exposed_s)}."
    )


# -------------------------------------------------------------------- alternatives


def alternatives(data: ReportData) -> Markup | None:
    """A table of the plans of all policies with bars of their predicted steps; ``None`` without a prediction."""
    prediction = data.prediction
    if prediction is None:
        return None
    chosen = (prediction.policy, prediction.step_s, prediction.error)
    found = [chosen, *((row.policy, row.step_s, row.error) for row in prediction.alternatives)]
    if all(policy != "none" for policy, _, _ in found):
        found.append(("none", prediction.none_s, 0.0))
    found.sort(key=lambda row: (row[1], row[0] != prediction.policy))
    most = max(step_s for _, step_s, _ in found)
    rows = []
    for policy, step_s, error in found:
        is_chosen = policy == prediction.policy
        ratio = f"{three_digits(prediction.none_s / step_s)} \N{MULTIPLICATION SIGN}" if step_s else NONE
        cells = (
            bar(("chosen" if is_chosen else "other", step_s), most=most),
            duration(step_s),
            ratio,
            three_digits(error) if error else "0",
        )
        name = [policy, tag("small", "chosen") if is_chosen else None]
        rows.append(table_row(name, cells, class_="is-chosen" if is_chosen else None))
    return table(("policy", "", "predicted step", "speed", "error"), rows, "Predicted steps", class_="bars")


def prediction_sentence(data: ReportData) -> str:
    """A sentence about the origin of the prediction."""
    prediction = data.prediction
    assert prediction is not None
    machine = f"{prediction.machine.name}, {'described' if prediction.estimated else 'measured'}"
    margin = f"within {percent(prediction.margin)}" if prediction.margin else "exact only if nothing disturbs"
    return (
        f"Predicted for {prediction.trace.name} on {machine}; {margin}. The error is that of the gradients of one "
        "step, relative to their norm; feedback adds it to the next."
    )


# -------------------------------------------------------------------- foot


def foot(data: ReportData) -> Markup:
    """The foot of the page: where it comes from."""
    parts = (
        f"Written by rank {data.rank} at step {data.step:,}, {data.made}.",
        f"Plan {data.fingerprint[:12]}, {plural(data.channels, 'channel')}"
        + (f", compresses from step {data.start_step:,}." if data.start_step else "."),
        data.software + ".",
        "MB are 1,000,000 bytes.",
    )
    return tag("footer", [tag("p", part) for part in parts])
