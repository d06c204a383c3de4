"""How long the choice of a plan takes, and how far plans are from the best ones, on one core.

    python -m bench.planner.selection
    python -m bench.planner.selection --parts speed memory

Each row of ``selection.csv`` is one figure. Seconds are those of the processor.

- ``speed``: a sweep over 314 tensors and the 174 programs on 8 machines of 8; the whole search with four compressors
  for the 314 gradients of ResNet-101, without and with the host, and the policy ``cupcake`` for them. Later searches of
  a process are measured.
- ``memory``: the largest memory of a process that plans 1000 tensors with all 4341 programs.
- ``exhaustive``: the plans of ``auto`` beside the best ones of all, for small random models on the shipped machines,
  whose predictions are taken as exact.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

import gckernels
from bench.lib.record import merge_csv
from gckernels.compressor import Compressor
from gckernels.sync.planner.choice import POLICIES
from gckernels.sync.planner.drafts.drafts import Option, draft_of_launches
from gckernels.sync.planner.drafts.options import all_options
from gckernels.sync.planner.drafts.problem import Problem
from gckernels.sync.planner.machines.description import Description
from gckernels.sync.planner.machines.files import load_machine
from gckernels.sync.planner.machines.machine import Machine
from gckernels.sync.planner.machines.scaling import scaled
from gckernels.sync.planner.search.search import Search
from gckernels.sync.planner.timeline.pricing import Pricer
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.programs.steps import Place
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import TracedTensor

KEY = ("part", "case", "figure")
TESTBEDS = ("espresso-nvlink", "espresso-pcie")
COMPRESSORS = ("EFSignSGD", "BlockQuant(bits=4)", "BlockQuant", "ChunkTopK")
HOST = (Place.DEVICE, Place.HOST)
INSTANCES = 200
MAX_BITS = 16
"""The largest small problem: the number of buckets times the binary logarithm of the number of options."""
Row = dict[str, str]


def resnet101() -> ModelTrace:
    """A trace of the 314 gradients of ResNet-101, with ready times in proportion to elements."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7), (64,), (64,)]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 23), (512, 3)):
        for block in range(blocks):
            for shape in ((width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)):
                shapes += [shape, shape[:1], shape[:1]]
            if block == 0:
                shapes += [(4 * width, inputs, 1, 1), (4 * width,), (4 * width,)]
            inputs = 4 * width
    return trace_of([*shapes, (1000, 2048), (1000,)][::-1])


def trace_of(shapes: list[tuple[int, ...]]) -> ModelTrace:
    """A trace of tensors with these shapes, whose backward takes 0.1 seconds."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    tensors, done = [], 0
    for number, (shape, numel) in enumerate(zip(shapes, sizes, strict=True)):
        done += numel
        tensors.append(TracedTensor(f"t{number}", numel, 0.1 * done / sum(sizes), shape))
    return ModelTrace("tensors", tuple(tensors), 0.1, 0.05)


def problem_of(
    trace: ModelTrace, machine: str, specs: tuple[str, ...], frontend: Frontend = Frontend.MODULE, **more: object
) -> Problem:
    """A problem in which all tensors with two dimensions or more may use all compressors."""
    compressors = tuple(map(gckernels.from_spec, specs))
    allowed: dict[str, tuple[Compressor, ...]] = {
        tensor.name: compressors for tensor in trace.tensors if tensor.shape is None or len(tensor.shape) > 1
    }
    return Problem(trace, Pricer(load_machine(machine)), frontend, allowed, **more)  # type: ignore[arg-type]


def seconds(work: Callable[[], object]) -> float:
    """The processor's time of some work."""
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


def row(part: str, case: str, figure: str, value: float, unit: str) -> Row:
    return {"part": part, "case": case, "figure": figure, "value": f"{value:.4g}", "unit": unit}


def speed() -> Iterator[Row]:
    """The times of sweeps and of whole searches."""
    distinct = trace_of([(1000 + 12_347 * index,) for index in range(314)])
    problem = problem_of(distinct, TESTBEDS[0], ())
    problem = Problem(
        distinct,
        problem.pricer,
        problem.frontend,
        dict.fromkeys((tensor.name for tensor in distinct.tensors), (gckernels.EFSignSGD(),)),
    )
    search, options = Search(problem), all_options(problem)
    draft = draft_of_launches([(tensor,) for tensor in range(314)], Option())
    search.improved(draft, options, sweeps=1)  # prices everything
    sweeps = [seconds(lambda: search.improved(draft, options, sweeps=1)) for _ in range(5)]
    yield row("speed", f"314 tensors x {len(options)} options", "sweep", statistics.median(sweeps) * 1e3, "ms")
    times = [seconds(lambda: POLICIES["cupcake"](problem_of(resnet101(), TESTBEDS[0], COMPRESSORS))) for _ in range(5)]
    case = f"ResNet-101, {len(COMPRESSORS)} compressors, device"
    yield row("speed", case, "cupcake", statistics.median(times[1:]) * 1e3, "ms")
    for places, case in (((Place.DEVICE,), "device"), (HOST, "device and host")):
        times = [
            seconds(lambda: POLICIES["auto"](problem_of(resnet101(), TESTBEDS[0], COMPRESSORS, places=places)))  # noqa: B023
            for _ in range(3)
        ]
        case = f"ResNet-101, {len(COMPRESSORS)} compressors, {case}"
        yield row("speed", case, "auto", min(times[1:]), "s")


def memory() -> Iterator[Row]:
    """The largest memory of another process, which plans."""
    command = [sys.executable, "-m", "bench.planner.selection", "--parts", "many-tensors"]
    megabytes = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
    yield row("memory", "1000 tensors, 4341 options, 1 compressor", "peak", megabytes, "MB")


def plan_many_tensors() -> None:
    """Plan 1000 tensors, and print the largest memory of the process in MB."""
    shapes: list[tuple[int, ...]] = [(64 + index, 256 + index) for index in range(1000)]
    POLICIES["auto"](problem_of(trace_of(shapes), TESTBEDS[0], COMPRESSORS[:1], places=HOST))
    # ru_maxrss would have the memory of the process that started this one as well
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
    print(int(peak) / 1024)


@dataclass(frozen=True)
class Trusted(Description):
    """A description whose predictions are taken as exact: ``auto`` takes the best plan, however little it gains."""

    margin = 0.0

    @staticmethod
    def of(description: Machine) -> Trusted:
        """The same machine, trusted."""
        assert isinstance(description, Description)
        return Trusted(**{each.name: getattr(description, each.name) for each in fields(description)})


def small_problem(rng: random.Random) -> Problem:
    """A random problem with two or three of DDP's buckets, on a shipped machine with another link."""
    tensors, buckets, ready_s = [], [], 0.0
    for bucket in range(rng.choice((2, 2, 3))):
        names = [f"t{bucket}.{index}" for index in range(rng.randint(1, 3))]
        for name in names:
            ready_s += rng.choice((0.0, 1e-4, 1e-3, 5e-3))
            tensors.append(TracedTensor(name, int(10 ** rng.uniform(2.5, 7)), ready_s))
        buckets.append(tuple(names))
    trace = ModelTrace("random", tuple(tensors), ready_s, buckets=tuple(buckets))
    problem = problem_of(trace, rng.choice(("lab", "two-sites-1gbit", "utility-p3-8xlarge")), (), Frontend.DDP)
    machine = Trusted.of(scaled(problem.machine, bandwidth_bit_per_s=10 ** rng.uniform(8, 11)))
    compressors = tuple(map(gckernels.from_spec, rng.sample(COMPRESSORS, rng.choice((1, 2)))))
    return Problem(trace, Pricer(machine), Frontend.DDP, {tensor.name: compressors for tensor in tensors})


def distances() -> Iterator[Row]:
    """How far plans are from the best ones."""
    rng = random.Random(1)
    found: list[Any] = []
    while len(found) < INSTANCES:
        problem = small_problem(rng)
        if len(problem.buckets) * math.log2(len(all_options(problem))) > MAX_BITS:
            continue
        best_s = problem.step_s(POLICIES["exhaustive"](problem))
        found.append(problem.step_s(POLICIES["auto"](problem)) / best_s - 1.0)
    within = sum(distance <= 0.01 for distance in found) / len(found)
    yield row("exhaustive", f"{len(found)} instances", "within 1 %", 100 * within, "%")
    yield row("exhaustive", f"{len(found)} instances", "largest distance", 100 * max(found), "%")


PARTS = {"speed": speed, "memory": memory, "exhaustive": distances}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=[*PARTS, "many-tensors"])
    parts = parser.parse_args().parts
    torch.set_num_threads(1)
    if parts == ["many-tensors"]:
        plan_many_tensors()
        return
    for part in parts:
        rows = []
        for each in PARTS[part]():
            print(each, flush=True)
            rows.append(each)
        print("wrote", merge_csv("selection", torch.device("cpu"), rows, KEY))


if __name__ == "__main__":
    main()
