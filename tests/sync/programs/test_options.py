"""Every option of the tree: their number is right, and each of them gives the mean."""

from __future__ import annotations

import collections
import functools
import math
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

import gckernels
from gckernels.sync import Topology, UnitPlan
from gckernels.sync.communication.communicators import Communicators
from gckernels.sync.engine.engine import Engine
from gckernels.sync.messages.encoded import EncodedMessage
from gckernels.sync.messages.message import Unit
from gckernels.sync.messages.seeds import Seeds
from gckernels.sync.programs import (
    HIERARCHICAL,
    AllGather,
    AllReduce,
    Decode,
    Encode,
    Level,
    Place,
    Program,
    ProgramError,
    ReduceScatter,
    enumerate_programs,
    ring,
)
from gckernels.sync.programs.residuals import ENCODINGS, encoded_regions
from gckernels.sync.programs.rules import sites
from gckernels.sync.programs.sizes import sizes_of
from gckernels.sync.programs.steps import Collective, Hop, describe
from gckernels.sync.resources.feedback import Feedback
from gckernels.sync.resources.lanes import DeviceLanes
from gckernels.sync.resources.memory_spaces import Places
from ranks import run_ranks, values_of
from workloads import digest_of, nccl_group, placed, summed

TWO_BY_TWO = Topology(machines=2, devices=2)
NUMELS = (0, 1, 5, 16, 70, 1000)
STEPS = 2  # the second sends what the first has left


# -------------------------------------------------------------------- number of options


def encodes(program: Program) -> int:
    return sum(isinstance(step, Encode) for step in program)


def is_flat(program: Program) -> bool:
    return all(step.level == Level.FLAT for step in program if isinstance(step, Collective))


@pytest.mark.parametrize("topology", [TWO_BY_TWO, Topology(3, 2), Topology(8, 8)])
@pytest.mark.parametrize(
    ("places", "flat", "by_encodes"),
    [((Place.DEVICE,), 12, [9, 59, 72, 30, 4]), (tuple(Place), 63, [9, 236, 1152, 1920, 1024])],
)
def test_as_many_options_as_in_the_paper(topology, places, flat, by_encodes):
    found = list(enumerate_programs(topology, places))
    assert len(found) == len(set(found)) == sum(by_encodes)  # 174 and 4341
    assert [collections.Counter(map(encodes, found))[count] for count in range(5)] == by_encodes
    assert sum(map(is_flat, found)) == flat


@pytest.mark.parametrize("topology", [Topology(4), Topology(1, 4)])
def test_without_two_levels_the_flat_ones_are_left(topology):
    found = list(enumerate_programs(topology))
    assert len(found) == 12 and all(map(is_flat, found))


def test_constraints():
    every = list(enumerate_programs(TWO_BY_TWO))
    assert list(enumerate_programs(TWO_BY_TWO, max_encodes=1)) == [
        program for program in every if encodes(program) <= 1
    ]
    reduced = list(enumerate_programs(TWO_BY_TWO, collectives=[AllReduce, AllGather]))
    assert reduced == [
        program
        for program in every
        if all(isinstance(step, AllReduce | AllGather) for step in program if isinstance(step, Collective))
    ]
    on_host = list(enumerate_programs(TWO_BY_TWO, [Place.HOST]))
    assert len(on_host) == len(every) and not set(on_host) & {program for program in every if encodes(program)}
    added = set(enumerate_programs(TWO_BY_TWO, summable=True)) - set(every)
    assert (Encode(), AllReduce(), Decode()) in added


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_encodes": -1}, "max_encodes must be None or an int from 0 up, got -1"),
        ({"max_encodes": 1.0}, "max_encodes"),
        ({"collectives": [Hop]}, "collectives must be among AllReduce, .* got <class .*Hop"),
        ({"places": []}, r"places must be one or both of .* got \[\]"),
        ({"places": ["device"]}, "places"),
    ],
)
def test_what_options_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        enumerate_programs(TWO_BY_TWO, **arguments)


# -------------------------------------------------------------------- results of the options


@functools.cache
def gradients(step: int, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Small integers: their sums and means over up to eight ranks are exact in any order, and in bf16."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return tuple(torch.randint(-4, 5, (numel,), generator=generator).to(dtype) * 8 for numel in NUMELS)


@functools.cache
def averages(step: int, world_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The means of the gradients of all ranks, in fp32."""
    everyone = zip(*(gradients(step, rank, dtype) for rank in range(world_size)), strict=True)
    return tuple(torch.stack(each).float().mean(0) for each in everyone)


@dataclass(frozen=True)
class Found:
    """A rank's measurements of a program with a compressor.

    Attributes:
        what: names of the program and the compressor.
        error: the largest difference between what a step gave and the mean.
        lost: the largest difference between the sum of all means and what was given plus what is in the residuals.
        digest: digest of the rank's results.
    """

    what: str
    error: float
    lost: float
    digest: str


CPU = torch.device("cpu")
ONE_MEMORY, APART = Places.of(CPU), Places(CPU, CPU, apart=True)
ON_GPU = Places.of(torch.device("cuda", 0))


def synchronise(
    programs: list[Program],
    specs: list[str],
    topology: Topology,
    dtype: torch.dtype,
    root: int,
    places: Places = ONE_MEMORY,
) -> list[Found]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    wanted = {site for program in programs for site in sites(program)}
    group = nccl_group() if places == ON_GPU else dist.group.WORLD
    communicators = Communicators(group, places, topology, wanted, channels=2)
    engine = Engine(DeviceLanes(places.device, communicators.offloads), communicators.phases)
    found = []
    for number, (program, spec) in enumerate((program, spec) for program in programs for spec in specs):
        compressor, feedback, seeds = gckernels.from_spec(spec), Feedback(places), Seeds(0, places)
        grads = [torch.zeros(numel, dtype=dtype, device=places.device) for numel in NUMELS]
        units = [
            Unit(UnitPlan(f"p{index}", grad.numel(), compressor, program, True, root=root), grad)
            for index, grad in enumerate(grads)
        ]
        message = EncodedMessage(units, communicators, feedback, seeds, channel=number % 2)
        digests, error = [], 0.0
        balance = [torch.zeros(numel) for numel in NUMELS]
        for step in range(STEPS):
            for grad, values in zip(grads, gradients(step, rank, dtype), strict=True):
                grad.copy_(values)
            seeds.begin(step)
            token = engine.submit(message, step, [engine.lanes.here()])
            engine.lanes.end_step()
            token.wait()
            if engine.lanes.error is not None:
                raise AssertionError(describe(program)) from engine.lanes.error
            results = [grad.cpu() for grad in grads]
            digests.append(digest_of(results))
            for total, mean, result in zip(balance, averages(step, world_size, dtype), results, strict=True):
                if mean.numel():
                    error = max(error, (result.float() - mean).abs().max().item())
                total += (mean - result.float()) / world_size  # summed over the ranks below
        residuals = feedback.state_dict()
        for unit, total in zip(units, balance, strict=True):
            encoded = encoded_regions(program, unit.grad.numel(), topology, rank, root)
            for kind, encoding in zip(ENCODINGS, encoded, strict=False):
                kept = residuals[kind][unit.plan.key].cpu() if encoding.stop > encoding.start else 0
                total[encoding.start : encoding.stop] -= encoding.weight * kept
        lost = summed(torch.cat(balance)).abs().max().item()
        found.append(Found(f"{describe(program)} with {spec}", error, lost, "".join(digests)))
    engine.lanes.close()
    communicators.close()
    return found


def check(outcomes: list[list[Found]], bounds: dict[str, float], dtype: torch.dtype = torch.float32) -> None:
    """Assert that ranks are equal and that errors are within each compressor's bound. In fp32 nothing is lost: every
    encoding, at most four in each step, on each of at most six ranks, rounds numbers below 128 by at most
    2**-18."""
    for first, *others in zip(*outcomes, strict=True):
        assert all(other.digest == first.digest for other in others), f"{first.what}: ranks differ"
        assert first.error <= bounds[first.what.rpartition(" with ")[2]], first
        if dtype == torch.float32:
            assert first.lost <= STEPS * 4 * 6 * 2.0**-18, first


# The steps of BlockQuant's 8 bits are 32 / 127 for numbers up to 32. An encoding is off by half a step, and residuals
# add as much again. No program encodes more than four times, except for a ring, which divides its sums by the number of
# ranks.
BLOCK_QUANT = 4 * 2 * 32 / 127 / 2
TERN_GRAD = math.inf  # random, and off by any number of its steps; ranks must still be equal
SLOW = pytest.mark.slow


# `make test` takes every sixth option of one compressor, and every twelfth of three in the narrow dtype
@pytest.mark.host_only("its messages are on the CPU")
@pytest.mark.parametrize(
    ("specs", "dtype", "root", "stride"),
    [
        (("BlockQuant",), torch.float32, 0, 6),
        pytest.param(("BlockQuant",), torch.float32, 0, 1, marks=SLOW),
        pytest.param(("Identity", "TernGrad"), torch.float32, 0, 1, marks=SLOW),
        (("Identity", "BlockQuant", "TernGrad"), torch.bfloat16, 3, 12),
        pytest.param(("Identity", "BlockQuant", "TernGrad"), torch.bfloat16, 3, 1, marks=SLOW),
    ],
)
def test_every_option_gives_the_mean_on_two_machines_of_two(specs, dtype, root, stride):
    """Identity gives the exact mean. In bf16 results of up to 32 are rounded by 1/16 after each of four encodings."""
    programs = list(enumerate_programs(TWO_BY_TWO))[stride // 2 :: stride]
    found = values_of(run_ranks(4, synchronise, programs, specs, TWO_BY_TWO, dtype, root))
    rounding = 0.0 if dtype == torch.float32 else 4 / 16
    check(found, {"Identity": 0.0, "BlockQuant": BLOCK_QUANT + rounding, "TernGrad": TERN_GRAD}, dtype)


@pytest.mark.host_only("its messages are on the CPU")
@pytest.mark.parametrize("stride", [8 * 61, pytest.param(61, marks=SLOW)])
def test_where_a_program_computes_does_not_change_the_result(stride):
    """The host has a memory of its own here, so every tensor that it needs must be copied."""
    every = enumerate_programs(TWO_BY_TWO, tuple(Place))
    programs = [program for program in every if program != placed(program, Place.DEVICE)][::stride]
    specs = ["TernGrad", "TopK(ratio=0.1)"]
    arguments = (specs, TWO_BY_TWO, torch.float32, 1)
    found = values_of(run_ranks(4, synchronise, programs, *arguments, APART))
    wanted = values_of(run_ranks(4, synchronise, [placed(program, Place.DEVICE) for program in programs], *arguments))
    assert len(programs) * stride > 3600
    check_same(found, wanted)


def check_same(found: list[list[Found]], wanted: list[list[Found]]) -> None:
    for mine, others in zip(found, wanted, strict=True):
        for got, want in zip(mine, others, strict=True):
            assert (got.digest, got.lost) == (want.digest, want.lost), got.what


GPU_PARTS = 8  # ranks on one card wait for each other's time slices, so each part takes long


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(GPU_PARTS))
@pytest.mark.parametrize("topology", [Topology(2), TWO_BY_TWO])
def test_a_gpu_gives_the_same_as_the_cpu(topology, part):
    """Several ranks share one card, each with a simulated host of its own. Sums of small integers are exact."""
    programs = [program for program in enumerate_programs(topology) if is_flat(program) or program == HIERARCHICAL]
    programs += list(enumerate_programs(topology, tuple(Place)))[::61]
    programs = programs[part::GPU_PARTS]
    arguments = (["Identity", "BlockQuant", "TopK(ratio=0.1)"], topology, torch.float32, 1)
    found = run_ranks(topology.world_size, synchronise, programs, *arguments, ON_GPU, timeout_s=300.0, fresh=True)
    check_same(values_of(found), values_of(run_ranks(topology.world_size, synchronise, programs, *arguments)))


@pytest.mark.host_only("its messages are on the CPU")
@pytest.mark.parametrize("stride", [31, pytest.param(7, marks=SLOW)])
@pytest.mark.parametrize("topology", [Topology(3, 2), pytest.param(Topology(2, 3), marks=SLOW)])
def test_levels_that_are_no_powers_of_two(topology, stride):
    """Thirds are not exact: Identity is off by the rounding of a few additions and products."""
    programs = list(enumerate_programs(topology))[::stride]
    found = values_of(run_ranks(6, synchronise, programs, ["Identity", "BlockQuant"], topology, torch.float32, 4))
    check(found, {"Identity": 32 * 8 * 2.0**-24, "BlockQuant": BLOCK_QUANT})


@pytest.mark.host_only("its messages are on the CPU")
@pytest.mark.parametrize(
    ("topology", "level"),
    [
        pytest.param(Topology(2), Level.FLAT, marks=SLOW),
        (Topology(3), Level.FLAT),
        pytest.param(Topology(5), Level.FLAT, marks=SLOW),
        pytest.param(Topology(10), Level.FLAT, marks=SLOW),  # more phases than there are communicators
        (TWO_BY_TWO, Level.INTER),
        pytest.param(Topology(3, 2), Level.INTER, marks=SLOW),
    ],
)
def test_the_ring_gives_the_mean(topology, level):
    program = ring(topology.size(level), level)
    if level == Level.INTER:
        program = (ReduceScatter(Level.INTRA), *program, AllGather(Level.INTRA))
    # ten processes take long on few cores
    specs = ["Identity", "BlockQuant", "TopK(ratio=1.0)"] if topology.world_size < 10 else ["BlockQuant"]
    arguments = ([program, placed(program, Place.HOST)], specs, topology, torch.float32, 0, APART)
    found = values_of(run_ranks(topology.world_size, synchronise, *arguments))
    exact = 32 * 8 * 2.0**-24
    check(found, {"Identity": exact, "TopK(ratio=1.0)": exact, "BlockQuant": BLOCK_QUANT})


@pytest.mark.parametrize("spec", ["DGC", "SigNUM", "SignSGD"])
def test_a_ring_needs_sums(spec):
    with pytest.raises(ProgramError, match=f"step 1, Hop: {spec} cannot encode sums on their way around a ring"):
        sizes_of(ring(3), 100, torch.float32, gckernels.from_spec(spec), Topology(3))
