"""How many warps the programs of a kernel have, beside half and twice as many: what each choice costs by machine code.

    python -m bench.kernels.warps
    python -m bench.kernels.warps TopK PowerSGD --dry

A tile is shared by the threads of a program, so that with half the warps a thread has twice the elements. It then needs
fewer instructions for addresses, random numbers and exchanges, and more registers, so that fewer warps are resident.
The kernels that go through whole units of 2**24 elements are compiled for compute capability 9.0 (no GPU is needed).
Columns:

- ``num_warps``, ``chosen``: warps of a program; "yes" for those that the package launches;
- ``registers``, ``stack_nbytes``: per thread;
- ``resident_warps``: warps that an SM holds at the same time, at most 64, limited by registers and shared memory;
- ``loading_nbytes``: what these warps have on the way if every thread has started all loads of a tile. The memory of an
  H200 moves 16 bytes per cycle and SM and answers after some 1000 cycles, so at least 16 KiB should be on the way.
  A decoder of few bits per element writes most of its bytes, and needs less;
- ``ratio``, ``busiest``: as in ``harness/machine_code/pipes.py``; empty where the compiler made accesses of less than
  16 bytes of those in a loop over tiles, by which the loop is recognised.

Writes ``bench/results/warps.csv``. Where instructions limit a kernel (its ratio is above 0.8), and another number of
warps takes less than nine tenths of their time, spills nothing and has enough on the way, that number is printed. Where
the memory limits a kernel, more resident warps are preferable to fewer instructions.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from typing import Any

import triton

from bench.lib.program import program_parser
from bench.lib.record import RESULTS, note_origin
from gckernels.testing.configurations import DEFAULTS
from gckernels.toolkit.kernels.launch import Launch
from harness.machine_code import pipes
from harness.machine_code.aot import compile_launch

SPECS = (*DEFAULTS, "PowerSGD", "PowerSGD(rank=32)")
TABLE = RESULTS / "warps.csv"
FACTORS = (0.5, 1, 2)
ENOUGH_NBYTES = 16 * 1024
COLUMNS = (
    *("configuration", "call", "gradient", "kernel", "num_warps", "chosen", "elements_per_thread", "registers"),
    *("stack_nbytes", "resident_warps", "loading_nbytes", "ratio", "busiest", "triton"),
)
_REGISTERS, _SHARED_NBYTES, _MAX_WARPS, _MAX_PROGRAMS = 65536, 227 * 1024, 64, 32  # an SM of capability 9.0 has these

Row = dict[str, str]

_work: list[tuple[tuple[str, str, str], Launch]] = []  # inherited by forked processes


def resident_warps(num_warps: int, registers: int, shared_nbytes: int) -> int:
    """The number of warps of a kernel that an SM of compute capability 9.0 holds at the same time."""
    of_warp = -(-registers // 8) * 8 * 32
    programs = min(
        _REGISTERS // (of_warp * num_warps),
        _SHARED_NBYTES // (shared_nbytes + 1024),  # the system keeps a KiB for each program
        _MAX_WARPS // num_warps,
        _MAX_PROGRAMS,
    )
    return programs * num_warps


def rows(specs: tuple[str, ...], dtypes: tuple[str, ...] = tuple(pipes.DTYPES)) -> list[Row]:
    """A row for every kernel that streams, and every number of warps."""
    _work.extend(
        ((spec, call, dtype), launch)
        for spec in specs
        for dtype in dtypes
        for call, launch in pipes.launches_of(spec, dtype)
        if not pipes.is_seldom(launch)
    )
    try:
        with multiprocessing.get_context("fork").Pool() as pool:
            return [row for found in pool.map(_rows, range(len(_work)), chunksize=1) for row in found]
    finally:
        _work.clear()


def _rows(index: int) -> list[Row]:
    where, chosen = _work[index]
    expected = pipes.pipes_of(chosen, pipes.NUMEL)
    if not expected.streams:
        return []
    found = []
    for factor in FACTORS:
        num_warps = int(chosen.num_warps * factor)
        launch = dataclasses.replace(chosen, num_warps=num_warps)
        if 1 <= num_warps <= 32:
            its = expected if factor == 1 else pipes.pipes_of(launch, pipes.NUMEL)
            found.append(_row(where, launch, its, factor == 1, bool(expected.path.repeated)))
    return found


def _row(where: tuple[str, str, str], launch: Launch, found: pipes.Pipes, chosen: bool, repeats: bool) -> Row:
    compiled, path = compile_launch(launch, pipes.CAPABILITY), found.path
    pipe = {"ratio": "", "busiest": ""}
    if bool(path.repeated) == repeats:
        pipe = {"ratio": f"{found.ratio:.2f}", "busiest": found.busiest}
    loads = [each.nbytes for each in path.repeated or path.once if each.base in ("LDG", "LDGSTS")]
    warps = resident_warps(launch.num_warps, compiled.registers, compiled.shared_nbytes)
    values: dict[str, Any] = {
        **dict(zip(("configuration", "call", "gradient"), where, strict=True)),
        **{"kernel": launch.name, "num_warps": launch.num_warps, "chosen": "yes" if chosen else ""},
        "elements_per_thread": f"{compiled.tile_numel / (launch.num_warps * 32):g}",
        **{"registers": compiled.registers, "stack_nbytes": compiled.stack_nbytes, "resident_warps": warps},
        **{"loading_nbytes": warps * 32 * sum(loads), **pipe},
        "triton": triton.__version__,
    }
    return {name: str(value) for name, value in values.items()}


def better_ones(table: list[Row]) -> list[str]:
    """Descriptions of the choices to which another number of warps is preferable, as the module's docstring has it."""
    chosen = {_key(row): row for row in table if row["chosen"]}
    found = []
    for row in table:
        mine = chosen[_key(row)]
        fits = row["ratio"] and row["stack_nbytes"] == "0" and int(row["loading_nbytes"]) >= ENOUGH_NBYTES
        if fits and float(mine["ratio"]) > pipes.BAR and float(row["ratio"]) < 0.9 * float(mine["ratio"]):
            warps = f"{mine['num_warps']} -> {row['num_warps']} warps"
            found.append(f"{', '.join(_key(row))}: {warps}, {mine['ratio']} -> {row['ratio']}")
    return found


def _key(row: Row) -> tuple[str, ...]:
    return tuple(row[name] for name in ("configuration", "call", "gradient", "kernel"))


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("specs", nargs="*", default=SPECS, help="compressors, all by default")
    parser.add_argument("--dry", action="store_true", help="print the rows instead of writing them")
    options = parser.parse_args()
    table = rows(tuple(options.specs))
    if options.dry:
        print(*(", ".join(row.values()) for row in table), sep="\n")
    else:
        pipes.write_table(TABLE, table, COLUMNS)
        note_origin(TABLE)
    print("\nother numbers of warps would be better for:", *better_ones(table), sep="\n")


if __name__ == "__main__":
    main()
