"""The picture of a traced step: a row for each lane, a bar for each stage, and the tables behind it."""

from __future__ import annotations

from ..engine.recorded_step import RecordedStage, RecordedStep, covered_s
from ..plans.numbers import duration, percent, plural, three_digits, volume
from ..programs.stages import StageKind
from .axes import ticks
from .data import EXACT
from .html import NONE, Content, Markup, details, percent_of, table, table_row, tag, wide

ROW = 26  # pixels of a row
_BAR = 18
_TOP = 24  # pixels of the axis above the rows
_TABLE = 400  # stages in the table
_SEND, _ENCODE, _DECODE, _COPY = "send", "encode", "decode", "copy"
_WORK = {
    StageKind.ENCODE: _ENCODE,
    StageKind.ENCODE_SHARD: _ENCODE,
    StageKind.RECODE: _ENCODE,
    StageKind.ADD: _ENCODE,
    StageKind.PROJECT: _ENCODE,
    StageKind.COLLECTIVE: _SEND,
    StageKind.AVERAGE: _SEND,
    StageKind.DECODE: _DECODE,
    StageKind.RECONSTRUCT: _DECODE,
    StageKind.CUT: _COPY,
    StageKind.JOIN: _COPY,
    StageKind.COPY: _COPY,
}
"""The work of stages as the picture tells it apart: a class of the style sheet, and the word in the legend."""


def lanes(step: RecordedStep) -> Markup:
    """The picture, its legend and its tables."""
    rows = ["gradients ready", *step.lanes]
    height = _TOP + ROW * len(rows)
    used = {_WORK[stage.kind] for stage in step.stages}
    legend = [tag("li", tag("i", class_=work), work) for work in dict.fromkeys(_WORK.values()) if work in used]
    names = [tag("li", name) for name in rows]
    picture = tag(
        "svg",
        tag("title", f"Lanes of step {step.step}: {plural(len(step.stages), 'stage')} on {len(step.lanes)} lanes"),
        _axis(step.end_s, height),
        [_rule(number) for number in range(len(rows))],
        _ready(step),
        [_bar(stage, step.end_s) for stage in step.stages],
        height=height,
        width="100%",
        role="img",
        data_end=step.end_s,
        data_top=_TOP,
    )
    return tag(
        "figure",
        tag("div", tag("ul", legend, class_="legend"), _buttons(), class_="bar"),
        tag(
            "div",
            tag("ol", names, class_="names", aria_hidden="true"),
            tag(
                "div",
                picture,
                class_="scroll",
                tabindex=0,
                role="group",
                aria_label="Lanes over time. Plus and minus zoom; arrow keys go along a message.",
            ),
            class_="lanes",
        ),
        tag("p", "Select a stage to follow its message.", class_="inspector script", aria_live="polite"),
        details("Table: lanes", _lane_table(step)),
        details("Table: stages", _stage_table(step)),
        id="lanes",
    )


def sentence(step: RecordedStep, plan_fingerprint: str) -> str:
    """A sentence about the share of sending in the step.

    Args:
        step: the step.
        plan_fingerprint: the fingerprint of the plan that runs now.
    """
    sending = covered_s((stage.start_s, stage.end_s) for stage in step.stages if _WORK[stage.kind] == _SEND)
    is_old = step.plan_fingerprint != plan_fingerprint
    whose = ", of a plan that ran before" if is_old else ""
    return (
        f"Step {step.step:,}{whose}. From the first gradient to the last mean it took {duration(step.end_s)}, and "
        f"something was sent for {duration(sending)}. Backward hid {duration(step.hidden_s)} of the sending; "
        f"after it, training waited for {duration(step.exposed_s)}."
    )


def _axis(end_s: float, height: int) -> Markup:
    marks = []
    for at in ticks(end_s * 1e3, 5):
        x = percent_of(at / 1e3, end_s)
        marks.append(tag("line", x1=x, x2=x, y1=_TOP - 6, y2=height, class_="grid"))
        anchor = "start" if not at else "end" if at / 1e3 > 0.95 * end_s else "middle"
        marks.append(tag("text", f"{at:g} ms", x=x, y=_TOP - 10, class_="tick", text_anchor=anchor))
    return tag("g", marks, class_="axis")


def _rule(number: int) -> Markup:
    y = _TOP + ROW * (number + 1)
    return tag("line", x1="0", x2="100%", y1=y, y2=y, class_="rule")


def _ready(step: RecordedStep) -> list[Markup]:
    """A mark for each message, when it was submitted."""
    at = {stage.message: stage.submitted_s for stage in step.stages}
    return [
        tag(
            "rect",
            tag("title", f"gradients of message {message} are ready at {duration(submitted)}"),
            x=percent_of(submitted, step.end_s),
            y=_TOP + (ROW - 14) // 2,
            width=3,
            height=14,
            rx=1,
            class_="ready",
            data_message=message,
        )
        for message, submitted in sorted(at.items())
    ]


def _bar(stage: RecordedStage, end_s: float) -> Markup:
    return tag(
        "rect",
        tag("title", _label(stage)),
        x=percent_of(stage.start_s, end_s),
        y=_TOP + ROW * (stage.lane + 1) + (ROW - _BAR) // 2,
        width=percent_of((stage.end_s - stage.start_s), end_s),
        height=_BAR,
        rx=2,
        class_=f"stage {_WORK[stage.kind]}",
        data_message=stage.message,
        data_name=stage.name,
    )


def _label(stage: RecordedStage) -> str:
    sent = f", sends {volume(stage.sent_nbytes)}" if stage.sent_nbytes else ""
    times = f"{duration(stage.end_s - stage.start_s)} from {duration(stage.start_s)}"
    compressors = ", ".join(dict.fromkeys(stage.compressors)) or EXACT
    return f"{stage.name}: {times}{sent}; message {stage.message}, {compressors}: {_units(stage)}"


def _units(stage: RecordedStage) -> str:
    shown = ", ".join(stage.units[:3])
    return shown if len(stage.units) <= 3 else f"{shown} and {len(stage.units) - 3} more"


def _buttons() -> Markup:
    buttons: list[Content] = [
        tag("button", sign, type="button", data_zoom=kind, aria_label=label, title=label)
        for sign, kind, label in (
            ("\N{MINUS SIGN}", "out", "zoom out"),
            ("+", "in", "zoom in"),
            ("Fit", "fit", "fit to the width"),
        )
    ]
    return tag("div", buttons, class_="buttons script")


def _lane_table(step: RecordedStep) -> Markup:
    rows = []
    for number, name in enumerate(step.lanes):
        stages = [stage for stage in step.stages if stage.lane == number]
        busy = covered_s((stage.start_s, stage.end_s) for stage in stages)
        sent = sum(stage.sent_nbytes for stage in stages)
        cells = (
            *(f"{len(stages):,}", duration(busy), percent(busy / step.end_s) if step.end_s else ""),
            volume(sent) if sent else NONE,
        )
        rows.append(table_row(name, cells))
    return wide(table(("lane", "stages", "busy", "of the step", "sent"), rows))


def _stage_table(step: RecordedStep) -> Markup:
    rows = [table_row(stage.name, _cells(step, stage)) for stage in step.stages[:_TABLE]]
    more = len(step.stages) - _TABLE
    note = tag("p", f"{more:,} more stages are left out.", class_="note") if more > 0 else None
    return wide(table(("stage", "lane", "message", "start, ms", "took, ms", "units"), rows), note)


def _cells(step: RecordedStep, stage: RecordedStage) -> tuple[str, ...]:
    times = (three_digits(stage.start_s * 1e3), three_digits((stage.end_s - stage.start_s) * 1e3))
    return (step.lanes[stage.lane], str(stage.message), *times, _units(stage))
