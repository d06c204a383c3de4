"""How busy every kernel keeps the pipes of an SM, next to the memory: one row per kernel, from its machine code.

A kernel is compiled ahead of time for compute capability 9.0, for one unit in one chunk, and a decoder for one source
and for eight, which it merges. A row has the cycles per element that an SM's share of the memory needs for the kernel's
bytes, and the cycles that each pipe is busy with the path of full tiles (``sass.py``). Their ratio says whether memory
or instructions limit the kernel. Nothing is measured: latencies, bank conflicts and branches that few tiles take are
not counted. Kernels that read a whole unit in rare cases alone (``SELDOM``) have the cycles of these cases, and no
ratio.
"""

from __future__ import annotations

import csv
import multiprocessing
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from math import isqrt, prod
from pathlib import Path

import torch
import triton

from gckernels.ops.chunktopk.groups import NUMEL_OF_PROGRAM
from gckernels.testing.configurations import CONFIGURATIONS
from gckernels.toolkit.kernels.launch import Launch
from harness.machine_code import sass
from harness.machine_code.aot import Compiled, compile_launch, disassemble
from harness.machine_code.launches import calls_of_one, calls_of_powersgd

CAPABILITY = 90
NUMEL = 2**24
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SOURCES = 8
MERGE = f"merge {SOURCES}"
"""The call that decodes payloads of ``SOURCES`` sources."""
NBYTES_PER_CYCLE = 4.2e12 / (132 * 1.98e9)
"""Bytes per cycle and SM: an H200 that copies 4.2 TB/s with 132 SMs at 1.98 GHz."""

BAR = 0.8
"""The ratio that a kernel should not exceed: above it, latencies do not hide behind the memory any more."""

_SPARSIFIER = "gckernels.toolkit.sparsifier"
SELDOM = {
    f"{_SPARSIFIER}.narrowing_kernels._digit_kernel",
    f"{_SPARSIFIER}.narrowing_kernels._count_kernel",
    f"{_SPARSIFIER}.emit_kernels._emit_kernel",
}
"""Kernels that read the candidates of a unit, a few in a hundred elements, and all of it where a sample misled."""

_CHUNKTOPK = "gckernels.ops.chunktopk.kernels._encode_kernel"

_PRODUCTS = "gckernels.ops.powersgd.products_kernels"
POWERSGD = {"PowerSGD": 4, "PowerSGD(rank=1)": 1, "PowerSGD(rank=32)": 32}
"""Ranks by configuration; the unit is a square matrix."""

KEY = ("configuration", "call", "gradient", "kernel")
COLUMNS = (*KEY, "nbytes", "memory", *sass.PIPES, "busiest", "ratio", "triton")

Row = dict[str, str]  # by column, as in the file


@dataclass(frozen=True)
class Pipes:
    """Cycles per element of the unit and SM.

    Attributes:
        nbytes: bytes per element that the kernel moves.
        memory: cycles that the memory needs for these bytes.
        cycles: cycles that each pipe is busy, by its name.
        path: the instructions that take them.
    """

    nbytes: float
    memory: float
    cycles: dict[str, float]
    path: sass.WarpCourse

    @property
    def busiest(self) -> str:
        """The pipe with the most cycles."""
        return max(self.cycles, key=self.cycles.__getitem__)

    @property
    def ratio(self) -> float:
        """Cycles of the busiest pipe over those of the memory."""
        return self.cycles[self.busiest] / self.memory

    @property
    def streams(self) -> bool:
        """Whether the kernel goes through the whole unit, with at least a byte per element; ``BAR`` is for these."""
        return self.nbytes >= 1.0


def pipes_of(launch: Launch, numel: int) -> Pipes:
    """How busy a launch keeps the pipes, for a unit of ``numel`` elements.

    Raises:
        RuntimeError, triton.CompilationError: as :func:`~harness.machine_code.aot.compile_launch`.
    """
    compiled = compile_launch(launch, CAPABILITY)
    searches, lists = rounds_of(launch)
    sources = dict(zip(launch.names, launch.args, strict=True)).get("num_sources", 1)
    path = sass.full_tile_path(disassemble(launch, CAPABILITY), searches, lists, merges=sources > 1)
    nbytes = moved_nbytes(launch, compiled) + matrix_nbytes(launch, numel)
    return estimate(path, compiled, nbytes, prod(launch.grid), numel, searches, lists, sources)


def rounds_of(launch: Launch) -> tuple[int, int]:
    """How often a kernel goes through its loops that are not over tiles: those that search, and those that list.

    These are averages over normally distributed values. ``ChunkTopK`` takes 4 steps to bound candidates and 6 to search
    them, and 9 until the last of several small groups is searched (7 for 16-bit gradients). No word of 32 elements has
    more than 4 candidates, or 5 to 8 where 4 are listed at a time. Equal magnitudes at the bound of a small group, as
    most programs for 16-bit gradients find, are not counted.
    """
    if _name(launch) != _CHUNKTOPK:
        return 1, 1
    return (9, 2) if launch.constexprs["C"].group <= NUMEL_OF_PROGRAM.value else (5, 4)


def _name(launch: Launch) -> str:
    return f"{launch.kernel.__module__}.{launch.kernel.__name__}"


def estimate(
    path: sass.WarpCourse,
    compiled: Compiled,
    nbytes: float,
    programs: int,
    numel: int,
    searches: int = 1,
    lists: int = 1,
    sources: int = 1,
) -> Pipes:
    """The cycles of ``programs`` programs, which take the same ``path`` and share the tiles of a unit equally.

    They go ``searches`` times through every loop that is neither over tiles nor over sources, or ``lists`` times if it
    stores. All sources take as long.
    """
    rounds = max(1.0, numel / (compiled.tile_numel * programs))
    once, repeated = sass.busy_cycles(path.once), sass.busy_cycles(path.repeated)
    searched, listed = sass.busy_cycles(path.searched), sass.busy_cycles(path.listed)
    merged = sass.busy_cycles(path.merged)
    cycles = {}
    for pipe in sass.PIPES:
        of_warp = once[pipe] + rounds * (repeated[pipe] + sources * merged[pipe])
        of_warp += searches * searched[pipe] + lists * listed[pipe]
        cycles[pipe] = programs * compiled.num_warps * of_warp / numel
    return Pipes(nbytes / numel, nbytes / numel / NBYTES_PER_CYCLE, cycles, path)


def matrix_nbytes(launch: Launch, numel: int) -> int:
    """The bytes of a matrix of ``numel`` elements that a product of PowerSGD loads and stores; 0 for other kernels.

    Addresses of matrices are in a table, so the matrices are not among the arguments.
    """
    if launch.kernel.__module__ != _PRODUCTS or "HAS_RESIDUAL" not in launch.constexprs:
        return 0
    element = launch.constexprs["DTYPE"].primitive_bitwidth // 8
    if launch.constexprs["HAS_RESIDUAL"]:
        element = (element + 4) * (2 if launch.name == "_reconstruct_kernel" else 1)
    return numel * element


def moved_nbytes(launch: Launch, compiled: Compiled) -> int:
    """The bytes of all tensors that the kernel accesses, twice for those that it both loads and stores.

    It assumes that every byte of these tensors is accessed once, which is what kernels that stream do.
    """
    kinds = {(access.argument, access.kind) for access in compiled.accesses}
    return sum(
        tensor.numel() * tensor.element_size()
        for name, tensor in zip(launch.names, launch.args, strict=True)
        if isinstance(tensor, torch.Tensor)
        for kind in ("load", "store", "atomic")
        if (name, kind) in kinds
    )


# -------------------------------------------------------------------- the table


_work: list[tuple[tuple[str, ...], Launch]] = []  # keys of rows, and launches; inherited by forked processes


def table(configurations: Collection[str], dtypes: Collection[str] = tuple(DTYPES)) -> list[Row]:
    """The rows of all kernels that these configurations launch for one unit, compiled on all cores.

    Args:
        configurations: which, by their names in ``configurations.py``, or in ``POWERSGD``.
        dtypes: names of the gradients' dtypes in ``DTYPES``.

    Raises:
        RuntimeError, triton.CompilationError: as :func:`~harness.machine_code.aot.compile_launch`.
    """
    launched: Counter[tuple[str, ...]] = Counter()
    for spec in configurations:
        for dtype in dtypes:
            for call, launch in launches_of(spec, dtype):
                key = spec, call, dtype, launch.name
                launched[key] += 1
                again = f" {launched[key]}" if launched[key] > 1 else ""
                _work.append(((*key[:-1], key[-1] + again), launch))
    try:
        with multiprocessing.get_context("fork").Pool() as pool:
            return sorted(pool.map(_row, range(len(_work)), chunksize=1), key=lambda row: [row[name] for name in KEY])
    finally:
        _work.clear()


def launches_of(spec: str, dtype: str) -> list[tuple[str, Launch]]:
    """The launches for one unit of a configuration, with the names of the calls that launch them."""
    if spec in POWERSGD:
        calls = calls_of_powersgd(DTYPES[dtype], isqrt(NUMEL), isqrt(NUMEL), POWERSGD[spec])
    else:
        calls = calls_of_one(CONFIGURATIONS[spec], DTYPES[dtype], NUMEL, 1, 1, accumulate=False)
        of_many = calls_of_one(CONFIGURATIONS[spec], DTYPES[dtype], NUMEL, 1, SOURCES, accumulate=False)
        calls += [(MERGE, tensors, recorded) for call, tensors, recorded in of_many if call == "decode"]
    return [(call, launch) for call, _, recorded in calls for launch in recorded]


def is_seldom(launch: Launch) -> bool:
    """Whether the kernel reads a whole unit in rare cases alone, see ``SELDOM``."""
    return _name(launch) in SELDOM


def _row(index: int) -> Row:
    key, launch = _work[index]
    pipes = pipes_of(launch, NUMEL)
    numbers = {"nbytes": pipes.nbytes, "memory": pipes.memory, **pipes.cycles}
    return {
        **dict(zip(KEY, key, strict=True)),
        **{name: f"{number:.3g}" for name, number in numbers.items()},
        "busiest": pipes.busiest,
        "ratio": f"{pipes.ratio:.2f}" if pipes.streams and not is_seldom(launch) else "",
        "triton": triton.__version__,
    }


def above_the_bar(rows: list[Row]) -> list[str]:
    """Descriptions of the kernels whose ratio exceeds ``BAR``, the largest ratio first."""
    above = sorted((row for row in rows if row["ratio"] and float(row["ratio"]) > BAR), key=_ratio, reverse=True)
    return [f"{', '.join(row[name] for name in KEY)}: {row['busiest']} {row['ratio']}" for row in above]


def busier(old: list[Row], new: list[Row]) -> list[str]:
    """Descriptions of rows of ``new`` with a larger ratio than in ``old``, and of rows that ``old`` lacks."""
    before = {tuple(row[name] for name in KEY): row["ratio"] for row in old}
    found = []
    for row in new:
        key = tuple(row[name] for name in KEY)
        if key not in before:
            found.append(f"{', '.join(key)}: not in the table")
        elif row["ratio"] and float(row["ratio"]) > float(before[key] or "0"):
            found.append(f"{', '.join(key)}: {row['busiest']} {before[key] or 'none'} -> {row['ratio']}")
    return found


def _ratio(row: Row) -> float:
    return float(row["ratio"])


def markdown(rows: list[Row]) -> str:
    """The table of the documentation: for each compressor, call and dtype the largest ratio of its kernels.

    Compressors have their default settings. Ratios above the bar are in bold, with the busiest pipe.
    """
    largest: dict[tuple[str, str, str], Row] = {}
    for row in rows:
        where = row["configuration"], row["call"], row["gradient"]
        if row["ratio"] and (where not in largest or _ratio(row) > _ratio(largest[where])):
            largest[where] = row
    columns = [(call, dtype) for call in ("encode", "encode with feedback", "decode", MERGE) for dtype in DTYPES]
    lines = [["compressor", *(f"{call}, {dtype}" for call, dtype in columns)]]
    lines.append(["---"] * len(lines[0]))
    for spec in dict.fromkeys(row["configuration"] for row in rows if "(" not in row["configuration"]):
        lines.append([f"`{spec}`", *(_cell(largest.get((spec, *column))) for column in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return f"**{row['ratio']} {row['busiest']}**" if _ratio(row) > BAR else row["ratio"]


def read_table(path: Path) -> list[Row]:
    """The table in a file; an empty list if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_table(path: Path, rows: list[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
