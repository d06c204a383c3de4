"""Explanations of plans as text for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...planner.machines.machine import Shared
from ...planner.timeline.timeline import Timeline
from ...plans.numbers import duration, percent, three_digits, volume
from ...plans.plan import Plan
from ..common.caveats import Band
from ..common.tables import shortened, table
from ..studies.alternatives import UnitAlternative
from ..studies.explanation import Explanation, MessageCost, averaged_s, busiest, summary

NAME_WIDTH = 36
_RESOURCES = {
    Shared.INTER: "the link between machines",
    Shared.INTRA: "the links inside a machine",
    Shared.DEVICE: "the device",
    Shared.CORES: "the cores",
    Shared.TO_HOST: "the copy to the host",
    Shared.TO_DEVICE: "the copy to the device",
}


def text(name: str, found: Explanation, band: Band, unit: str | None) -> str:
    """The explanation of a plan, or of one of its units."""
    step_s, tried = found.timeline.step_s, [each for each in found.messages if each.alternatives]
    gain = found.none_s / step_s if step_s else 1.0
    takes = f"{band.takes} {duration(step_s)} ({band.text(step_s)})"
    parts = [
        f"{name}: {takes}, {gain:.2f} times as fast as without compression ({duration(found.none_s)})",
        _phases(found.timeline),
    ]
    if unit is not None:
        heading = f"With {unit} alone sent in another way:"
        table_ = _alternatives_table(found.messages[0].alternatives, step_s, band)
        parts += ["", _messages_table(found.messages), "", heading, "", table_]
    elif tried:
        parts += ["", _messages_table(tried, step_s)]
    if rest := [each for each in found.messages if not each.alternatives]:
        nbytes = sum(each.nbytes for each in rest)
        more = "more messages" if tried else "messages"
        parts.append(
            f"{len(rest)} {more} with {volume(nbytes)}: --messages {len(found.messages)} tries these in other ways, too"
        )
    parts += ["", _why_not_faster(found, band)]
    parts += [f"With {name}: {duration(seconds)}." for name, seconds in found.what_if_s.items()]
    return "\n".join(parts)


def _phases(found: Timeline) -> str:
    phases = {
        "forward": found.forward_s,
        "backward": found.backward_s,
        "until all gradients are averaged": found.exposed_s,
        "optimizer": found.optimizer_s,
    }
    return ", ".join(f"{name} {duration(seconds)}" for name, seconds in phases.items() if seconds)


def _messages_table(messages: Sequence[MessageCost], step_s: float | None = None) -> str:
    """A table of messages: what each costs and, given the step, how that changes if it is sent in another way."""
    head = ["launch", "units", "ready", "size", "sent as", "encode", "send", "decode"]
    rows = []
    for message in messages:
        first, *others = message.units
        cells = [
            str(message.launch),
            shortened(first, NAME_WIDTH) + (f" +{len(others)}" if others else ""),
            duration(message.ready_s),
            volume(message.nbytes),
            _sent_as(message),
            *(duration(seconds) for seconds in (message.encode_s, message.send_s, message.decode_s)),
        ]
        rows.append(cells if step_s is None else [*cells, *_changes(message, step_s)])
    return table(head if step_s is None else [*head, "exactly", "best other way"], rows, left=(1, 4, 9))


def _changes(message: MessageCost, step_s: float) -> tuple[str, str]:
    """The changes of the step with the message sent exactly, and in the best other way."""
    exact = [each for each in message.alternatives if each.compressor == "exactly"]
    other = [each for each in message.alternatives if each.compressor != "exactly" and each.allowed]
    best = min(other, key=lambda each: each.step_s, default=None)
    return (
        change(exact[0].step_s - step_s) if exact else "",
        f"{change(best.step_s - step_s)}: {best.compressor}, {best.program}" if best else "",
    )


def _sent_as(message: MessageCost) -> str:
    if not message.compressors:
        return "exact" if message.program == "allreduce" else f"exact, {message.program}"
    channel = f", channel {message.channel}" if message.channel else ""
    return f"{'+'.join(message.compressors)}, {message.program}{channel}"


def change(seconds: float) -> str:
    """A change of the step, such as ``"+1.20 ms"``; ``"0"`` below a microsecond."""
    if abs(seconds) < 1e-6:
        return "0"
    return f"{'+' if seconds > 0 else '-'}{duration(abs(seconds))}"


def _alternatives_table(tried: Sequence[UnitAlternative], step_s: float, band: Band) -> str:
    """A table of other ways to send a unit, the fastest first."""
    rows = [
        (
            each.compressor,
            each.program,
            duration(each.step_s),
            change(each.step_s - step_s),
            "?" if each.error is None else three_digits(each.error),
            "" if each.allowed else "not allowed by --accuracy",
        )
        for each in sorted(tried, key=lambda each: each.step_s)
    ]
    return table(("compressor", "program", band.column, "change", "error", ""), rows, left=(0, 1, 5))


def _why_not_faster(found: Explanation, band: Band) -> str:
    """Sentences about the busiest resource and about everything that the step waits for."""
    parts = []
    if most := busiest(found.timeline):
        shared, seconds = most
        verb = "are" if shared in (Shared.CORES, Shared.INTRA) else "is"
        between = " between forward and optimizer" if band.whole_step else ""
        of = f"{duration(seconds)} of {duration(averaged_s(found.timeline))}"
        parts.append(f"{_RESOURCES[shared]} {verb} busy for {of}{between}")
    pieces = ", ".join(f"{name} {duration(seconds)}" for name, seconds in summary(found.chain))
    parts.append(f"the step waits for {pieces}")
    return f"Why not faster: {'; '.join(parts)}."


def comparison(timelines: Mapping[str, Timeline], plans: Mapping[str, Plan], band: Band) -> str:
    """A table of two plans, and the number of units that they send in different ways."""
    rows = [
        (
            name,
            duration(found.step_s),
            duration(found.backward_s),
            duration(found.exposed_s),
            str(len({stage.message for stage in found.stages})),
            f"{_RESOURCES[most[0]]}, {percent(most[1] / averaged_s(found))}" if (most := busiest(found)) else "",
        )
        for name, found in timelines.items()
    ]
    one, other = (plan.by_key for plan in plans.values())
    differing = [key for key in one if one[key] != other.get(key)]
    few = ", ".join(differing[:3]) + (", ..." if len(differing) > 3 else "")
    heads = ("plan", band.column, "backward", "exposed", "messages", "busiest")
    differ = f"{len(differing)} of {len(one)} units differ{f': {few}' if few else ''}"
    return f"{table(heads, rows, left=(0, 5))}\n{differ}"
