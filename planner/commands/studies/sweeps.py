"""Sweeps: values of one thing after the other, and the trace and the machine for each value."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from gckernels.sync.plans.numbers import rate
from gckernels.sync.traces.model_trace import ModelTrace

from ...machines.description import Description
from ...machines.machine import Machine, Replicas, Shared
from ...machines.scaling import scaled, sending_bit_per_s
from ..common.outcome import wrong_use

Scene = tuple[ModelTrace, Machine]
MAX_VALUES = 50
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_MANTISSAS = (1.0, 2.0, 5.0)  # values of a range: 1, 2, 5, 10, 20, ...


@dataclass(frozen=True)
class Axis:
    """Something that a sweep changes."""

    title: str  # its name for people
    value: Callable[[str], float]  # reads a value
    label: Callable[[float], str]  # the text of a value
    scene: Callable[[ModelTrace, Machine, float], Scene]  # the trace and the machine with another value


@dataclass(frozen=True)
class Sweep:
    """The values of an axis."""

    name: str  # the name of the axis
    axis: Axis
    values: tuple[float, ...]  # the values, in the order in which they were given


def bandwidth_from(text: str) -> float:
    """The bits per second of a text such as ``"100mbit"`` or ``"2.5gbit"``."""
    match = re.fullmatch(r"([0-9]*\.?[0-9]+)([kmgt]?bit)", text)
    value = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"a bandwidth must be written like 100mbit or 2.5gbit, got {text!r}")
    return value


def _whole(text: str) -> float:
    if not re.fullmatch(r"[1-9][0-9]{0,5}", text):
        raise ValueError(f"a number of machines must be an integer from 1 up, got {text!r}")
    return float(text)


def _factor(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"a factor must be a number above 0, such as 0.5 or 2, got {text!r}")
    return value


def with_batch(trace: ModelTrace, factor: float) -> ModelTrace:
    """The trace with another batch size: forward and backward take ``factor`` times as long."""
    tensors = tuple(replace(tensor, ready_s=tensor.ready_s * factor) for tensor in trace.tensors)
    return replace(trace, tensors=tensors, forward_s=trace.forward_s * factor, backward_s=trace.backward_s * factor)


AXES: Mapping[str, Axis] = {
    "bandwidth": Axis(
        "bandwidth between machines",
        bandwidth_from,
        rate,
        lambda trace, machine, value: (trace, scaled(machine, bandwidth_bit_per_s=value)),
    ),
    "machines": Axis(
        "machines",
        _whole,
        "{:.0f}".format,
        lambda trace, machine, value: (trace, scaled(machine, machines=int(value))),
    ),
    "batch": Axis(
        "batch size, times that of the trace",
        _factor,
        "x {:g}".format,
        lambda trace, machine, value: (with_batch(trace, value), machine),
    ),
    "encode": Axis(
        "speed of codecs, times that of the machine",
        _factor,
        "x {:g}".format,
        lambda trace, machine, value: (trace, scaled(machine, codec_speed=value)),
    ),
}
"""Everything that can be swept, by name."""


def sweep_from(text: str) -> Sweep:
    """The sweep of a text such as ``"bandwidth=100mbit:100gbit"`` or ``"machines=2,4,8"``.

    Raises:
        CommandError: the text is not valid.
    """
    name, equals, given = text.partition("=")
    if not equals or name not in AXES or not given:
        raise wrong_use(
            f"--sweep must be one of {', '.join(AXES)} with values, got {text!r}",
            "write bandwidth=100mbit:100gbit for a range, or machines=2,4,8",
        )
    axis = AXES[name]
    try:
        ends = given.split(":")
        if len(ends) == 2:
            low, high = map(axis.value, ends)
            values = _range(low, high, whole=name == "machines")
        else:
            values = tuple(dict.fromkeys(map(axis.value, given.split(","))))
    except ValueError as error:
        raise wrong_use(f"--sweep {name}: {error}", "write LOW:HIGH, or values with commas between them") from None
    if len(values) > MAX_VALUES:
        raise wrong_use(f"--sweep {name}: {len(values)} values are more than {MAX_VALUES}", "take fewer values")
    return Sweep(name, axis, values)


def _range(low: float, high: float, whole: bool) -> tuple[float, ...]:
    """The values 1, 2, 5, 10 and so on from ``low`` to ``high``, and both ends; powers of two for whole numbers."""
    if not low < high:
        raise ValueError("the low end must be below the high end")
    values = [low]
    if whole:
        while values[-1] * 2 < high:
            values.append(values[-1] * 2)
        return (*values, high)
    exponent = math.floor(math.log10(low))
    while 10.0**exponent < high:
        values += [each * 10.0**exponent for each in _MANTISSAS if low * 1.001 < each * 10.0**exponent < high * 0.999]
        exponent += 1
    return (*values, high)


def with_faster_links(machine: Machine, factor: float) -> Machine:
    """The machine as it was read, with links between machines, or inside the only one, that are ``factor`` times as
    fast, software that sends through them included.

    Raises:
        MachineError: the machine has one rank.
    """
    if isinstance(machine, Replicas):
        return Replicas(with_faster_links(machine.base, factor))
    found = _described_link(machine)
    if found is None:
        return scaled(machine, bandwidth_bit_per_s=factor * sending_bit_per_s(machine))
    description, shared = found
    link = description.links[shared]
    rates = (factor * link.bandwidth_bit_per_s, factor * link.limit_bit_per_s)
    faster = replace(link, bandwidth_bit_per_s=rates[0], limit_bit_per_s=rates[1])
    return replace(description, links={**description.links, shared: faster})


def software_limit(machine: Machine) -> float | None:
    """The bits per second that software gets through a link of a described machine, if that is less than the link
    carries."""
    found = _described_link(machine.base if isinstance(machine, Replicas) else machine)
    if found is None:
        return None
    link = found[0].links[found[1]]
    return link.limit_bit_per_s if link.limit_bit_per_s < link.bandwidth_bit_per_s * link.efficiency else None


def _described_link(machine: Machine) -> tuple[Description, Shared] | None:
    """A description, and its link between machines, or inside the only one; ``None`` for a machine that was measured or
    has one rank."""
    if not isinstance(machine, Description) or machine.topology.world_size == 1:
        return None
    return machine, Shared.INTER if machine.topology.machines > 1 else Shared.INTRA
