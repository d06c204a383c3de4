"""Option tables of problems: the stages of every option, priced for every launch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gckernels.method import Method
from gckernels.ops import Identity

from ..programs.lanes import LaneKey
from ..programs.stages import MessageKind, Resource
from ..programs.steps import Program
from .drafts import Option
from .lane_times import BACKWARD, LaneTimes, OptionTable
from .machine import Floats, MachineError, Shared
from .pricing import PricedStage, Units
from .problem import Problem

RESOURCES = tuple(Shared)
"""The shared resources in the order of the columns of a table."""
Launches = tuple[tuple[int, ...], ...]
SMALL_NUMEL = 1 << 14
"""A tensor that may not be compressed travels raw beside the payloads of its launch if it has no more elements."""


def carried(problem: Problem, tensors: Sequence[int], option: Option) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The tensors that a message with the option has, and those that are averaged in place beside it.

    Small tensors that may not be compressed are in the message, unless it would have nothing else.
    """
    if option.compressor is None:
        return tuple(tensors), ()
    allowed = {tensor for tensor in tensors if may_use(problem, tensor, option.compressor)}
    kept = [
        tensor in allowed or (problem.trace.tensors[tensor].numel <= SMALL_NUMEL and problem.encodable(tensor))
        for tensor in tensors
    ]
    if not allowed:
        kept = [False] * len(kept)
    return (
        tuple(tensor for tensor, keep in zip(tensors, kept, strict=True) if keep),
        tuple(tensor for tensor, keep in zip(tensors, kept, strict=True) if not keep),
    )


def may_use(problem: Problem, tensor: int, compressor: Method | None) -> bool:
    """Whether a tensor may be compressed with a compressor."""
    traced = problem.trace.tensors[tensor]
    return problem.encodable(tensor) and traced.numel > 0 and compressor in problem.allowed.get(traced.name, ())


def option_table(problem: Problem, launches: Launches, options: Sequence[Option]) -> OptionTable:
    """The stages of every option for launches that are one message each.

    An option for which the machine lacks a price takes infinitely long.
    """
    rows = priced_rows(problem, launches, options)
    width = 1 + max(len(row) for row in rows)
    lanes: dict[LaneKey, int] = {}
    numbers = np.full((len(options), width), -1, dtype=np.intp)
    seconds = np.zeros((len(launches), len(options), width))
    work_s = np.zeros((len(launches), len(options), len(RESOURCES)))
    capacities = problem.machine.capacities
    delays_backward = capacities.get(problem.machine.computes_on, 1.0) <= 1.0
    for index, row in enumerate(rows):
        if not row:
            seconds[:, index, 0] = np.inf
        for number, stage in enumerate(row):
            spec = stage.spec
            in_backward = delays_backward and spec.resource == Resource.COMPUTE and spec.phase == 0
            numbers[index, number] = BACKWARD if in_backward else lanes.setdefault(stage.lane(), len(lanes) + 1)
            seconds[:, index, number] = stage.price.alone_s
            for shared, work in stage.price.work_s.items():
                work_s[:, index, RESOURCES.index(shared)] += work / capacities.get(shared, 1.0)
    numbers[numbers < 0] = len(lanes) + 1
    return OptionTable(numbers, seconds, work_s, len(lanes) + 2)


def lane_times(problem: Problem, launches: Launches, table: OptionTable, choice: Sequence[int]) -> LaneTimes:
    """The times of steps with a table of the same launches."""
    ready_s = [max(problem.trace.tensors[tensor].ready_s for tensor in launch) for launch in launches]
    gaps_s: Floats = np.diff(np.maximum.accumulate([0.0, *ready_s]))
    backward_s = np.zeros(len(RESOURCES))
    on = problem.machine.computes_on
    backward_s[RESOURCES.index(on)] = problem.trace.backward_s / problem.machine.capacities.get(on, 1.0)
    return LaneTimes(gaps_s, table, choice, backward_s)


def usable(problem: Problem, launches: Launches, options: Sequence[Option]) -> npt.NDArray[np.bool_]:
    """``[launches, options]``: whether each launch may use each option.

    It may use a compressor that one of its tensors may use. All its tensors must have dtypes that the program takes.
    """
    encodable = np.array([all(map(problem.encodable, launch)) for launch in launches])
    columns: dict[Method | None, npt.NDArray[np.bool_]] = {None: encodable}
    for compressor in {option.compressor for option in options if option.compressor is not None}:
        allowed = {name for name, methods in problem.allowed.items() if compressor in methods}
        uses = [any(problem.trace.tensors[tensor].name in allowed for tensor in launch) for launch in launches]
        columns[compressor] = encodable & np.array(uses)
    everyone = np.ones(len(launches), dtype=bool)
    return np.stack([everyone if option.in_place else columns[option.compressor] for option in options], axis=1)


def priced_rows(problem: Problem, launches: Launches, options: Sequence[Option]) -> list[tuple[PricedStage, ...]]:
    """For each option its stages, with prices ``[launches]``; no stages if the machine lacks a price."""
    dtypes = [problem.dtype(launch[0] if launch else 0) for launch in launches]
    rows: list[tuple[PricedStage, ...]] = [()] * len(options)
    groups: dict[tuple[bool, Method | None], list[int]] = {}
    for index, option in enumerate(options):
        groups.setdefault((option.in_place, option.compressor), []).append(index)
    for (in_place, compressor), members in groups.items():
        kind = MessageKind.IN_PLACE if in_place else MessageKind.ENCODED
        units = units_of(problem, launches, compressor)
        programs = [options[index].program for index in members]
        of_dtype = {dtype: _table(problem, kind, programs, units, dtype) for dtype in dict.fromkeys(dtypes)}
        for place, index in enumerate(members):
            rows[index] = _merged([of_dtype[dtype][place] for dtype in of_dtype], list(of_dtype), dtypes)
    return rows


def units_of(problem: Problem, launches: Launches, compressor: Method | None) -> list[Units]:
    """The units of launches that are one message each, by the method that they are fitted with."""
    tensors = problem.trace.tensors
    fitted = [[(tensors[tensor].numel, problem.fitted(tensor, compressor)) for tensor in launch] for launch in launches]
    methods = dict.fromkeys((compressor or Identity(), *(method for each in fitted for _, method in each)))
    return [Units.of(used, [[size for size, by in each if by == used] for each in fitted]) for used in methods]


def _table(
    problem: Problem, kind: MessageKind, programs: Sequence[Program], units: Sequence[Units], dtype: torch.dtype
) -> list[tuple[PricedStage, ...]]:
    """The prices of all programs; those that lack one are found one by one, and have no stages."""
    try:
        return problem.pricer.table(kind, programs, units, dtype)
    except MachineError:
        if len(programs) == 1:
            return [()]
        return [row for program in programs for row in _table(problem, kind, [program], units, dtype)]


def _merged(
    rows: Sequence[tuple[PricedStage, ...]], dtypes: Sequence[torch.dtype], of_launch: Sequence[torch.dtype]
) -> tuple[PricedStage, ...]:
    """The stages with each launch's price for its own dtype."""
    if len(rows) == 1 or not all(rows):
        return rows[0] if len(rows) == 1 else ()
    which = np.array([dtypes.index(dtype) for dtype in of_launch])
    return tuple(_picked(stages, which) for stages in zip(*rows, strict=True))


def _picked(stages: Sequence[PricedStage], which: npt.NDArray[np.intp]) -> PricedStage:
    def pick(columns: Sequence[Floats]) -> Floats:
        picked: Floats = np.choose(which, columns)
        return picked

    first = stages[0].price
    work_s = {shared: pick([stage.price.work_s[shared] for stage in stages]) for shared in first.work_s}
    alone_s = pick([stage.price.alone_s for stage in stages])
    return PricedStage(stages[0].spec, type(first)(alone_s, work_s, first.submit_s))
