"""The memory that a plan takes on a rank beside the gradients, and plans that stay within a budget.

A plan takes memory for the residuals of its units and the buffers of its messages, on the device and, for steps on the
host, there. All of it is allocated when a message is built, and kept: later steps allocate nothing, and any number of
messages can be in flight. So :func:`plan_nbytes` is an upper bound.
"""

from __future__ import annotations

import collections
import functools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gckernels.codec import chunk_numel

from ..communication.communicators import DryCommunicators
from ..messages.build import build_message
from ..messages.seeds import Seeds
from ..plans.grouping import MessageSpec, PlacedUnit, message_kind
from ..plans.plan import Plan, UnitPlan
from ..plans.strides import in_reals
from ..programs.named import SHARDS
from ..programs.stages import MessageKind
from ..programs.steps import Level
from ..programs.topology import Topology
from ..resources.feedback import Feedback
from ..resources.memory_spaces import Places

_META = torch.device("meta")


def within_budget(
    caller: str,
    plan: Plan,
    parameters: Mapping[str, torch.nn.Parameter],
    world_size: int,
    budget_nbytes: float,
    copies: bool = False,
    residual_bits: int = 32,
) -> Plan:
    """The plan, with units averaged in place without compression until it needs at most ``budget_nbytes``.

    Units that need most memory are taken first, and a warning names them. The result is the same on all ranks, because
    a unit counts with its memory on the rank where it needs most.

    Args:
        caller: name of the calling function, for the warning.
        plan: a valid plan.
        parameters: the parameters of the plan, by name.
        world_size: number of ranks.
        budget_nbytes: maximum number of bytes.
        copies, residual_bits: as for :func:`plan_nbytes`.
    """
    if world_size == 1:
        return plan
    dtypes = {name: in_reals(parameter).dtype for name, parameter in parameters.items()}
    apart = any(Places.of(parameter.device).apart for parameter in parameters.values())
    needs = plan_nbytes(plan, dtypes, plan.topology_of(world_size), apart, copies, residual_bits)
    total, dropped = sum(needs), set()
    for index in sorted(range(len(needs)), key=lambda index: (-needs[index], index)):
        if total <= budget_nbytes:
            break
        total -= needs[index]
        dropped.add(index)
    if not dropped:
        return plan
    names = ", ".join(plan.units[index].key for index in sorted(dropped))
    warnings.warn(
        f"{caller}: the plan needs {sum(needs) / 2**20:.1f} MiB, more than the budget of "
        f"{budget_nbytes / 2**20:.1f} MiB; these units are averaged without compression: {names}",
        stacklevel=2,
    )
    return plan.with_units(unit.exactly() if index in dropped else unit for index, unit in enumerate(plan.units))


def plan_nbytes(
    plan: Plan,
    dtypes: Mapping[str, torch.dtype],
    topology: Topology,
    apart: bool = False,
    copies: bool = False,
    residual_bits: int = 32,
) -> list[int]:
    """Bytes of the residuals, factors and buffers of each unit, on device and host together.

    Each number is for the rank on which the unit needs most.

    Args:
        plan: a valid plan.
        dtypes: dtypes of the parameters' real numbers, by name.
        topology: topology of the ranks.
        apart: as in :class:`~gckernels.sync.resources.memory_spaces.Places`.
        copies: whether residuals and factors are copied, for a gradient scaler.
        residual_bits: 8 if residuals are in 8 bits where an encoding can, otherwise 32.
    """
    needs = []
    for unit, kind in _kinds(plan):
        ranks = set() if unit.in_place else {0, unit.root, topology.world_size - 1}
        dtype = dtypes[unit.parameter]
        found = (_nbytes_on(rank, unit, kind, dtype, topology, apart, copies, residual_bits) for rank in ranks)
        needs.append(max(found, default=0))
    return needs


def rank_nbytes(plan: Plan, dtypes: Mapping[str, torch.dtype], topology: Topology, apart: bool = False) -> int:
    """Bytes of the residuals, factors and buffers of a plan on the rank that needs most, on device and host together.

    Units with a root need most there, and the roots of a plan are spread over the ranks. Many units are alike, so it
    takes milliseconds for large models.

    Args:
        plan, dtypes, topology, apart: as for :func:`plan_nbytes`.
    """
    alike: collections.Counter[tuple[UnitPlan, MessageKind, torch.dtype]] = collections.Counter()
    for unit, kind in _kinds(plan):
        if not unit.in_place:
            unnamed = UnitPlan("unit", unit.numel, unit.compressor, unit.program, unit.feedback, root=unit.root)
            alike[unnamed, kind, dtypes[unit.parameter]] += 1

    @functools.cache
    def needed(unit: UnitPlan, kind: MessageKind, dtype: torch.dtype) -> int:
        return _nbytes_on(0, unit, kind, dtype, topology, apart, False)

    totals = dict.fromkeys({0, *(unit.root for unit, _, _ in alike)}, 0)
    for (unit, kind, dtype), count in alike.items():
        for rank in totals:
            totals[rank] += count * needed(replace(unit, root=_seen_from(rank, unit.root, topology)), kind, dtype)
    return max(totals.values())


def _seen_from(rank: int, root: int, topology: Topology) -> int:
    """A root that is to rank 0, whose shards are full, what ``root`` is to ``rank``. It is the rank itself, one of its
    machine, the rank in the same place of another machine, or another one."""
    level = topology.index
    device = 0 if level(Level.INTRA, rank) == level(Level.INTRA, root) else topology.devices - 1
    machine = 0 if level(Level.INTER, rank) == level(Level.INTER, root) else topology.machines - 1
    return machine * topology.devices + device


def _kinds(plan: Plan) -> Iterator[tuple[UnitPlan, MessageKind]]:
    """The units of a plan, with the kinds of their messages. In messages of low-rank methods, a unit that is sent
    exactly is in the buffers of both factors."""
    low_rank = {unit.program for unit in plan.units if message_kind([unit]) == MessageKind.LOW_RANK}
    for unit in plan.units:
        yield unit, MessageKind.LOW_RANK if unit.program in low_rank else message_kind([unit])


class _Allocations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of new tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.nbytes: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.zeros, torch.ops.aten.new_zeros, torch.ops.aten.zeros_like):
            self.nbytes += result.nbytes
        return result


def _nbytes_on(
    rank: int,
    unit: UnitPlan,
    kind: MessageKind,
    dtype: torch.dtype,
    topology: Topology,
    apart: bool,
    copies: bool,
    residual_bits: int = 32,
) -> int:
    """Bytes of a message of one unit on ``rank``, counted while it is built of tensors without memory."""
    placed, shape = PlacedUnit(unit, 0), [unit.numel]
    if unit.program == SHARDS:
        row = chunk_numel(unit.numel, topology.world_size)
        placed, shape = replace(placed, row=row), [topology.world_size, row]
    spec = MessageSpec(kind, unit.program, (placed,))
    buffer = torch.empty(shape, dtype=dtype, device=_META)
    places = Places(_META, _META, apart)
    communicators: Any = DryCommunicators(rank, topology, places)
    feedback, seeds = Feedback(places, residual_bits), Seeds(0, places)
    with _Allocations() as allocations:
        build_message(spec, buffer, communicators, feedback, seeds, False)
    return int(allocations.nbytes) + (feedback.nbytes() if copies else 0)
