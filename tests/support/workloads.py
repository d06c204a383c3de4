"""Combinations of compressors and programs for tests, plans for them, and reductions of tensors for comparisons."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import operator
import os
from collections.abc import Collection, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from _pytest.mark import ParameterSet
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gckernels
from gckernels.compressor import Compressor
from gckernels.sync import Attachment, Frontend, Plan, Topology, UnitPlan
from gckernels.sync.programs import PROGRAMS, Place, Program, ProgramError
from gckernels.sync.programs.sizes import sizes_of
from gckernels.sync.programs.steps import Coding
from gckernels.sync.states.layout import kept_regions

SPECS = (*sorted(gckernels.COMPRESSORS), "PowerSGD(one_sided=True)")
"""Every method at its default setting, and a setting of PowerSGD that sends different messages."""


FEW = ("Cast16", "DGC", "EFSignSGD", "Identity")


def topology(world_size: int) -> Topology:
    """A topology with two devices in each machine if ``world_size`` is even, otherwise with one."""
    return Topology(world_size) if world_size % 2 else Topology(world_size // 2, 2)


def fits(compressor: Compressor, program: str, world_size: int = 2) -> bool:
    """Whether units of ``compressor`` can use the program of that name."""
    try:
        sizes_of(PROGRAMS[program], 100, torch.float32, compressor.fit((10, 10)), topology(world_size))
    except ProgramError:
        return False
    return True


def combinations(*programs: str) -> list[tuple[str, str]]:
    """Names ``(compressor, program)``: every method with every program, or every named program, that fits it.

    ``allreduce`` does not encode, so only Identity is combined with it. Programs that are not the default of any method
    are combined with few compressors.
    """
    only = {"allreduce": ("Identity",), "parameter_server": FEW, "hierarchical": FEW}
    return [
        (name, program)
        for name in SPECS
        for program in programs or PROGRAMS
        if fits(gckernels.from_spec(name), program) and name in only.get(program, SPECS)
    ]


def thinned(cases: Iterable[tuple[Any, ...]], every: int) -> list[ParameterSet]:
    """The cases as parameters of a test, with all but every ``every``-th marked slow."""
    return [pytest.param(*case, marks=[pytest.mark.slow] if index % every else []) for index, case in enumerate(cases)]


def one_of_each(turn: int = 0) -> list[tuple[str, str]]:
    """One combination of every compressor, whose programs take turns, and at least one of every program.

    Tests with another ``turn`` have other combinations.
    """
    by_compressor = itertools.groupby(combinations(), operator.itemgetter(0))
    found = [
        pairs[(index + turn) % len(pairs)] for index, pairs in enumerate(list(pairs) for _, pairs in by_compressor)
    ]
    for pair in combinations():
        if pair[1] not in {program for _, program in found}:
            found.append(pair)
    return found


def with_two_or_three_ranks(
    settings: Iterable[tuple[Any, ...]], quick: Collection[tuple[Any, ...]] | None = None
) -> list[ParameterSet]:
    """Parameters ``(world_size, *setting)`` with two and with three ranks, one of them marked slow, and both where the
    setting is not ``quick``.

    The slow one alternates irregularly, because neighbouring settings often share a compressor, and every other setting
    often a program.
    """
    world_sizes = ((2, 3), (3, 2), (3, 2), (2, 3))
    return [
        pytest.param(size, *setting, marks=[pytest.mark.slow] if second or (quick and setting not in quick) else [])
        for index, setting in enumerate(settings)
        for second, size in enumerate(world_sizes[index % 4])
    ]


def placed(program: Program, place: Place) -> Program:
    """The program with all its encoding and decoding at ``place``."""
    return tuple(dataclasses.replace(step, place=place) if isinstance(step, Coding) else step for step in program)


LAUNCHES = ("each", "backwards", "all", "pairs", "messages", "channels")
"""Names of ways to launch the units of a plan, for :func:`launched`."""


def launched(plan: Plan, how: str) -> Plan:
    """The plan, whose units are launched as ``how`` says."""
    count = len({unit.parameter for unit in plan.units})
    numbers = {name: index for index, name in enumerate(dict.fromkeys(unit.parameter for unit in plan.units))}
    match how:
        case "each":  # the order in which gradients are ready
            launch = {name: count - index for name, index in numbers.items()}
        case "backwards":  # all wait for the last gradient
            launch = dict(numbers)
        case "all" | "channels":
            launch = dict.fromkeys(numbers, 5)
        case _:
            launch = {name: 10 * (count - index // 2) for name, index in numbers.items()}
    units = [dataclasses.replace(unit, launch=launch[unit.parameter]) for unit in plan.units]
    if how == "messages":  # every other unit of a launch
        units = [dataclasses.replace(unit, message=2 * unit.launch + i % 2) for i, unit in enumerate(units)]
    if how == "channels":
        units = [dataclasses.replace(unit, channel=index % 3) for index, unit in enumerate(units)]
    return Plan(tuple(units), channels=3, frontend=Frontend.MODULE)


def nccl_group() -> dist.ProcessGroup:
    """A group of all ranks on the first GPU; each claims a separate host: NCCL accepts one rank per GPU and host."""
    os.environ["NCCL_HOSTID"] = f"rank{dist.get_rank()}"
    torch.cuda.set_device(0)
    return dist.new_group(backend="nccl")


def with_feedback(plan: Plan) -> Plan:
    """The plan with a residual for every compressed unit, even if training does not need it."""
    units = [dataclasses.replace(unit, feedback=unit.compressor.name != "Identity") for unit in plan.units]
    return dataclasses.replace(plan, units=tuple(units))


MIXED = (
    ("BlockQuant", "alltoall"),
    ("EFSignSGD", "allgather"),
    ("Cast16", "encoded_allreduce"),
    ("Identity", "allreduce"),
    ("BlockQuant(bits=4)", "allgather"),
    ("Cast16(dtype='float16')", "encoded_allreduce"),
    ("Identity", "alltoall"),
    ("EFSignSGD(block=128)", "alltoall"),
)


def mixed_plan(parameters: dict[str, nn.Parameter]) -> Plan:
    """A plan in which neighbouring units differ in compressor and program; vectors are compressed too."""
    settings = itertools.cycle(MIXED)
    units = []
    for name, parameter in parameters.items():
        compressor, program = next(settings)
        units.append(UnitPlan(name, parameter.numel(), gckernels.from_spec(compressor), PROGRAMS[program], False))
    return Plan(tuple(units))


def trained(ddp_model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters that DDP synchronises, by name."""
    return {name: parameter for name, parameter in ddp_model.module.named_parameters() if parameter.requires_grad}


def digest_of(tensors: Any) -> str:
    """A hash of the bits of ``tensors``, which may include ``None``."""
    digest = hashlib.blake2b()
    for tensor in tensors:
        if tensor is None:
            digest.update(b"none")
        else:
            flat = tensor.detach().contiguous().view(-1)
            digest.update(flat.view(torch.uint8).cpu().numpy().tobytes() if flat.numel() else b"empty")
    return digest.hexdigest()


def in_memory_order(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """``values`` as a vector, in the memory order of ``parameter``, which its gradient and residual share."""
    ordered = torch.empty_like(parameter, dtype=values.dtype).copy_(values)
    return ordered.as_strided((ordered.numel(),), (1,))


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` summed over the ranks, in place."""
    dist.all_reduce(tensor)
    return tensor


def largest(value: float) -> float:
    """The largest ``value`` of all ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


def parked_of(attachment: Attachment) -> dict[str, torch.Tensor]:
    """The means over all ranks of what earlier plans have left behind, fp64, by parameter, without zeros."""
    parts, ranks = attachment._parking.state_dict(), dist.get_world_size()
    nothing = torch.zeros(())
    means = {
        name: summed(parts.get(name, nothing.expand(numel)).double()) / ranks
        for name, numel in attachment._parking.sizes.items()
    }
    return {name: mean for name, mean in means.items() if mean.any()}


def mass_of(attachment: Attachment) -> dict[str, torch.Tensor]:
    """Gradient mass that is still in residuals, and the mean momentum, per unit: all states, fp64, over all ranks."""
    feedback, rank, masses = attachment.state_dict()["feedback"], dist.get_rank(), {}
    for unit in attachment.plan.units:
        mass = torch.zeros(unit.compressor.traits.states, unit.numel, dtype=torch.float64)
        for kind, encoding in kept_regions(unit, attachment.plan.topology_of(dist.get_world_size()), rank).items():
            if unit.key in feedback[kind]:
                residual = feedback[kind][unit.key].view(unit.encoder(kind).traits.states, -1)
                mass[-len(residual) :, encoding.start : encoding.stop] += encoding.weight * residual
        masses[unit.key] = summed(mass)
    return masses
