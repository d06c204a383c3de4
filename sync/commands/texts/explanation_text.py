"""Explanations of plans as text for people and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...planner.machines.machine import Shared
from ...planner.timeline.timeline import Timeline
from ...plans.numbers import duration, percent, plural, three_digits, volume
from ...plans.plan import Plan
from ..common.error_bars import Band
from ..common.tables import shortened, table
from ..studies.alternatives import UnitAlternative
from ..studies.chain import summary
from ..studies.explanation import Explanation, MessageRow, averaged_s, busiest

NAME_WIDTH = 36
_RESOURCES = {
    "inter": "the link between machines",
    "intra": "the links inside a machine",
    "device": "the device",
    "cores": "the cores",
    "to-host": "the copy to the host",
    "to-device": "the copy to the device",
}


# -------------------------------------------------------------------- text


def text(name: str, found: Explanation, band: Band) -> str:
    """The explanation of all messages."""
    step_s, tried = found.timeline.step_s, [row for row in found.rows if row.alternatives]
    gain = found.none_s / step_s if step_s else 1.0
    takes = f"{band.takes} {duration(step_s)} ({band.text(step_s)})"
    parts = [
        f"{name}: {takes}, {gain:.2f} times as fast as without compression ({duration(found.none_s)})",
        _phases(found.timeline),
    ]
    if tried:
        parts += ["", messages_table(tried)]
    if rest := [row for row in found.rows if not row.alternatives]:
        nbytes = sum(row.cost.nbytes for row in rest)
        more = "more messages" if tried else "messages"
        parts.append(
            f"{len(rest)} {more} with {volume(nbytes)}: --messages {len(found.rows)} tries these in other ways, too"
        )
    parts += ["", why_not_faster(found, band)]
    parts += [f"With {name}: {duration(seconds)}." for name, seconds in found.what_if.items()]
    return "\n".join(parts)


def _phases(found: Timeline) -> str:
    phases = {
        "forward": found.forward_s,
        "backward": found.backward_s,
        "until all gradients are averaged": found.exposed_s,
        "optimizer": found.optimizer_s,
    }
    return ", ".join(f"{name} {duration(seconds)}" for name, seconds in phases.items() if seconds)


def messages_table(rows: Sequence[MessageRow]) -> str:
    """A table of messages: what each costs, and how the step changes if it is sent in another way."""
    head = ("launch", "units", "ready", "size", "sent as", "encode", "send", "decode", "exactly", "best other way")
    return table(head, [_message_cells(row) for row in rows], left=(1, 4, 9))


def _message_cells(row: MessageRow) -> tuple[str, ...]:
    cost = row.cost
    first, *others = cost.keys
    exact = [each for each in row.alternatives if each.compressor == "exactly"]
    other = [each for each in row.alternatives if each.compressor != "exactly" and each.allowed]
    best = min(other, key=lambda each: each.change_s, default=None)
    return (
        str(cost.launch),
        shortened(first, NAME_WIDTH) + (f" +{len(others)}" if others else ""),
        duration(cost.ready_s),
        volume(cost.nbytes),
        _chosen(row),
        duration(cost.encode_s),
        duration(cost.send_s),
        duration(cost.decode_s),
        change(exact[0].change_s) if exact else "",
        f"{change(best.change_s)}: {best.compressor}, {best.program}" if best else "",
    )


def _chosen(row: MessageRow) -> str:
    if not row.compressors:
        return "exact" if row.program == "allreduce" else f"exact, {row.program}"
    channel = f", channel {row.channel}" if row.channel else ""
    return f"{'+'.join(row.compressors)}, {row.program}{channel}"


def change(seconds: float) -> str:
    """A change of the step, such as ``"+1.20 ms"``; ``"0"`` below a microsecond."""
    if abs(seconds) < 1e-6:
        return "0"
    return f"{'+' if seconds > 0 else '-'}{duration(abs(seconds))}"


def why_not_faster(found: Explanation, band: Band) -> str:
    """Sentences about the busiest resource and about everything that the step waits for."""
    parts = []
    if most := busiest(found.timeline):
        shared, seconds = most
        name = _RESOURCES[shared.value]
        verb = "are" if shared in (Shared.CORES, Shared.INTRA) else "is"
        between = " between forward and optimizer" if band.whole_step else ""
        parts.append(f"{name} {verb} busy for {duration(seconds)} of {duration(averaged_s(found.timeline))}{between}")
    pieces = ", ".join(f"{name} {duration(seconds)}" for name, seconds in summary(found.chain))
    parts.append(f"the step waits for {pieces}")
    return f"Why not faster: {'; '.join(parts)}."


def unit_text(name: str, step_s: float, rows: Sequence[MessageRow], band: Band) -> str:
    """The explanation of one unit, in all of its messages."""
    parts = []
    for row in rows:
        cost = row.cost
        others = [key for key in cost.keys if name not in (key, *key.split("["))]
        beside = f", in a message with {plural(len(others), 'other unit')}" if others else ""
        parts.append(
            f"{cost.keys[0] if len(cost.keys) == 1 else name}: launch {cost.launch}, ready after "
            f"{duration(cost.ready_s)}{beside}"
        )
        parts.append(
            f"  sent as {_chosen(row)}; the message: {volume(cost.nbytes)}, encode {duration(cost.encode_s)}, "
            f"send {duration(cost.send_s)}, decode {duration(cost.decode_s)}"
        )
    takes = f"{band.takes[0].upper()}{band.takes[1:]} {duration(step_s)} ({band.text(step_s)})"
    parts += ["", f"{takes}. With the unit sent in another way:", ""]
    return "\n".join([*parts, alternatives_table(rows[0].alternatives, band)])


def alternatives_table(tried: Sequence[UnitAlternative], band: Band) -> str:
    """A table of other ways to send units, the fastest first."""
    rows = [
        (
            each.compressor,
            each.program,
            duration(each.step_s),
            change(each.change_s),
            "?" if each.error is None else three_digits(each.error),
            "" if each.allowed else "not allowed by --accuracy",
        )
        for each in sorted(tried, key=lambda each: each.step_s)
    ]
    return table(("compressor", "program", band.column, "change", "error", ""), rows, left=(0, 1, 5))


def comparison(timelines: Mapping[str, Timeline], plans: Mapping[str, Plan], band: Band) -> str:
    """A table of plans, and the number of units that they send in different ways."""
    rows = [
        (
            name,
            duration(found.step_s),
            duration(found.backward_s),
            duration(found.exposed_s),
            str(len({stage.message for stage in found.stages})),
            _busy(found),
        )
        for name, found in timelines.items()
    ]
    lines = [table(("plan", band.column, "backward", "exposed", "messages", "busiest"), rows, left=(0, 5))]
    ways = [{unit.key: unit for unit in plan.units} for plan in plans.values()]
    if len(ways) > 1:
        one, other = ways
        differing = [key for key in one if one[key] != other.get(key)]
        few = ", ".join(differing[:3]) + (", ..." if len(differing) > 3 else "")
        lines.append(f"{len(differing)} of {len(one)} units differ{f': {few}' if few else ''}")
    return "\n".join(lines)


def _busy(found: Timeline) -> str:
    most = busiest(found)
    if most is None:
        return ""
    return f"{_RESOURCES[most[0].value]}, {percent(most[1] / averaged_s(found))}"


# -------------------------------------------------------------------- JSON


def record(found: Explanation, band: Band) -> dict[str, Any]:
    """The explanation of all messages as JSON; times are in seconds."""
    most = busiest(found.timeline)
    return {
        **timeline_record(found.timeline),
        **band.record(),
        "none_s": found.none_s,
        "busiest": None if most is None else {"resource": most[0].value, "busy_s": most[1]},
        "chain": [
            {"what": piece.what, "launch": piece.launch, "start_s": piece.start_s, "end_s": piece.end_s}
            for piece in found.chain
        ],
        "what_if_s": dict(found.what_if),
        "messages": [message_record(row) for row in found.rows],
    }


def timeline_record(found: Timeline) -> dict[str, Any]:
    """The times of a timeline as JSON, in seconds."""
    return {
        "step_s": found.step_s,
        "forward_s": found.forward_s,
        "backward_s": found.backward_s,
        "exposed_s": found.exposed_s,
        "optimizer_s": found.optimizer_s,
        "busy_s": {shared.value: seconds for shared, seconds in found.busy_s.items()},
    }


def message_record(row: MessageRow) -> dict[str, Any]:
    """A message as JSON; times are in seconds."""
    cost = row.cost
    return {
        "message": cost.number,
        "launch": cost.launch,
        "units": list(cost.keys),
        "nbytes": cost.nbytes,
        "ready_s": cost.ready_s,
        "compressors": list(row.compressors),
        "program": row.program,
        "channel": row.channel,
        "encode_s": cost.encode_s,
        "send_s": cost.send_s,
        "decode_s": cost.decode_s,
        "copy_s": cost.copy_s,
        "alternatives": [
            {
                "compressor": each.compressor,
                "program": each.program,
                "step_s": each.step_s,
                "allowed": each.allowed,
                "error": each.error,
            }
            for each in row.alternatives
        ],
    }
