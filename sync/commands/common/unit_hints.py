"""Slips of units: numbers in a description or a trace that are valid, but so far off that they were meant in another
unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ...planner.machines.description import Description
from ...planner.machines.machine import Machine
from ...traces.model_trace import Trace

_LEAST_RATE, _LONGEST_S = 1e6, 1.0
_RATES = {
    "bit_per_s": "bits per second: 100 Gbit/s are 1e11",
    "byte_per_s": "bytes per second: 900 GB/s are 9e11",
    "byte_per_core_s": "bytes per second: 1 GB/s is 1e9",
}
_SECONDS = "seconds: 10 us are 1e-5"
_SHORTEST_S, _LONGEST_BACKWARD_S, _LARGE = 1e-4, 3600.0, 10**6


def slips_of_machine(machine: Machine) -> list[str]:
    """Sentences about rates and latencies of a description that no link and no device has."""
    found = []
    for path, value in _numbers(machine) if isinstance(machine, Description) else ():
        unit = next((text for end, text in _RATES.items() if path.endswith(end)), None)
        is_slow = unit is not None and value < _LEAST_RATE
        is_long = unit is None and path.endswith("_s") and value > _LONGEST_S
        if is_slow or is_long:
            found.append(f"{machine.name}: {path} is {value:g}, in {unit or _SECONDS}")
    return found


def slips_of_trace(trace: Trace) -> list[str]:
    """A sentence about the time of backward, if no model of that size has it."""
    numel = sum(tensor.numel for tensor in trace.tensors)
    if trace.backward_s > _LONGEST_BACKWARD_S or (trace.backward_s < _SHORTEST_S and numel >= _LARGE):
        unit = "ready_us is in microseconds, ready_s and backward_s are in seconds"
        return [f"{trace.model}: backward of {numel:,} elements takes {trace.backward_s:g} s; {unit}"]
    return []


def _numbers(machine: Description) -> Iterator[tuple[str, float]]:
    """The dotted paths and the values of the numbers of a description that have a unit."""
    links = {f"links.{shared.value}": link for shared, link in machine.links.items()}
    parts = {"device": machine.gpu, "host": machine.host, "copies": machine.copies, "overheads": machine.overheads}
    for name, part in (links | parts).items():
        if part is not None:
            yield from ((f"{name}.{key}", value) for key, value in dataclasses.asdict(part).items())
