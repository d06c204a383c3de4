"""Explanations of plans, for people and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gckernels.sync.plans.numbers import duration, percent, three_digits, volume
from gckernels.sync.plans.plan import Plan

from ...machines.machine import Shared
from ...timeline.timeline import Timeline
from ..common.caveats import Band
from ..common.outcome import BLANK, Part
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


def parts(name: str, found: Explanation, band: Band, unit: str | None) -> list[Part]:
    """The explanation of a plan, or of one of its units."""
    step_s, tried = found.timeline.step_s, [each for each in found.messages if each.alternatives]
    gain = found.none_s / step_s if step_s else 1.0
    takes = f"{band.takes} {duration(step_s)} ({band.text(step_s)})"
    head = f"{name}: {takes}, {gain:.2f} times as fast as without compression ({duration(found.none_s)})"
    lines = []
    if unit is not None:
        heading = f"With {unit} alone sent in another way:"
        table_ = _alternatives_table(found.messages[0].alternatives, step_s, band)
        lines += ["", _messages_table(found.messages), "", heading, "", table_]
    elif tried:
        lines += ["", _messages_table(tried, step_s)]
    if rest := [each for each in found.messages if not each.alternatives]:
        nbytes = sum(each.nbytes for each in rest)
        more = "more messages" if tried else "messages"
        lines.append(
            f"{len(rest)} {more} with {volume(nbytes)}: --messages {len(found.messages)} tries these in other ways, too"
        )
    what_if = "\n".join(f"With {name}: {duration(seconds)}." for name, seconds in found.what_if_s.items())
    return [
        Part(f"{head}\n{_phases(found.timeline)}", timeline_record(found.timeline) | {"none_s": found.none_s}),
        Part("\n".join(lines) if lines else None, {"messages": list(map(asdict, found.messages))}),
        BLANK,
        _why_not_faster(found, band),
        Part(what_if, {"what_if_s": dict(found.what_if_s)}),
    ]


def timeline_record(found: Timeline) -> dict[str, Any]:
    """The times of a timeline as JSON, in seconds."""
    times = {name: getattr(found, name) for name in ("step_s", "forward_s", "backward_s", "exposed_s", "optimizer_s")}
    return times | {"busy_s": {shared.value: seconds for shared, seconds in found.busy_s.items()}}


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
    columns: dict[str, Callable[[MessageCost], str]] = {
        "launch": lambda each: str(each.launch),
        "units": lambda each: (
            shortened(each.units[0], NAME_WIDTH) + (f" +{len(each.units) - 1}" if len(each.units) > 1 else "")
        ),
        "ready": lambda each: duration(each.ready_s),
        "size": lambda each: volume(each.nbytes),
        "sent as": _sent_as,
        "encode": lambda each: duration(each.encode_s),
        "send": lambda each: duration(each.send_s),
        "decode": lambda each: duration(each.decode_s),
    }
    if step_s is not None:
        columns["exactly"] = lambda each: _exactly(each, step_s)
        columns["best other way"] = lambda each: _best_other(each, step_s)
    return table(messages, columns, left=(1, 4, 9))


def _exactly(message: MessageCost, step_s: float) -> str:
    """The change of the step with the message sent exactly."""
    exact = [each for each in message.alternatives if each.compressor == "exactly"]
    return change(exact[0].step_s - step_s) if exact else ""


def _best_other(message: MessageCost, step_s: float) -> str:
    """The change of the step with the message sent in the best other way, and how that is."""
    other = [each for each in message.alternatives if each.compressor != "exactly" and each.allowed]
    best = min(other, key=lambda each: each.step_s, default=None)
    return f"{change(best.step_s - step_s)}: {best.compressor}, {best.program}" if best else ""


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
    columns: dict[str, Callable[[UnitAlternative], str]] = {
        "compressor": lambda each: each.compressor,
        "program": lambda each: each.program,
        band.column: lambda each: duration(each.step_s),
        "change": lambda each: change(each.step_s - step_s),
        "error": lambda each: "?" if each.error is None else three_digits(each.error),
        "": lambda each: "" if each.allowed else "not allowed by --accuracy",
    }
    return table(sorted(tried, key=lambda each: each.step_s), columns, left=(0, 1, 5))


def _why_not_faster(found: Explanation, band: Band) -> Part:
    """Sentences about the busiest resource and about everything that the step waits for."""
    sentences: list[str] = []
    record: dict[str, Any] = {"busiest": None, "chain": list(map(asdict, found.chain))}
    if most := busiest(found.timeline):
        shared, seconds = most
        record["busiest"] = {"resource": shared.value, "busy_s": seconds}
        verb = "are" if shared in (Shared.CORES, Shared.INTRA) else "is"
        between = " between forward and optimizer" if band.whole_step else ""
        of = f"{duration(seconds)} of {duration(averaged_s(found.timeline))}"
        sentences.append(f"{_RESOURCES[shared]} {verb} busy for {of}{between}")
    pieces = ", ".join(f"{name} {duration(seconds)}" for name, seconds in summary(found.chain))
    sentences.append(f"the step waits for {pieces}")
    return Part(f"Why not faster: {'; '.join(sentences)}.", record)


def comparison(timelines: Mapping[str, Timeline], plans: Mapping[str, Plan], band: Band) -> Part:
    """A table of two plans, and the number of units that they send in different ways; in JSON the second's times."""
    columns: dict[str, Callable[[str], str]] = {
        "plan": str,
        band.column: lambda name: duration(timelines[name].step_s),
        "backward": lambda name: duration(timelines[name].backward_s),
        "exposed": lambda name: duration(timelines[name].exposed_s),
        "messages": lambda name: str(len({stage.message for stage in timelines[name].stages})),
        "busiest": lambda name: _busiest(timelines[name]),
    }
    one, other = (plan.by_key for plan in plans.values())
    differing = [key for key in one if one[key] != other.get(key)]
    few = ", ".join(differing[:3]) + (", ..." if len(differing) > 3 else "")
    differ = f"{len(differing)} of {len(one)} units differ{f': {few}' if few else ''}"
    _, against = timelines.values()
    return Part(f"\n{table(timelines, columns, left=(0, 5))}\n{differ}", {"against": timeline_record(against)})


def _busiest(found: Timeline) -> str:
    most = busiest(found)
    return f"{_RESOURCES[most[0]]}, {percent(most[1] / averaged_s(found))}" if most else ""
