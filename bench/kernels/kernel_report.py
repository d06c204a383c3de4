"""Tables of every kernel of every configuration as compiled: registers, accesses, instructions; and busy pipes.

    python -m bench.kernels.kernel_report              # print the tables, and what is worse than in the recorded ones
    python -m bench.kernels.kernel_report --pipes      # only the table of pipes
    python -m bench.kernels.kernel_report --update     # also record them in bench/results/{kernels,pipes}.csv

``harness/machine_code/kernel_table.py`` and ``harness/machine_code/pipes.py`` document the columns. Kernels whose
busiest pipe needs more than 0.8 of the memory's time are listed at the end.
"""

from __future__ import annotations

from pathlib import Path

import triton

from bench.lib.program import program_parser
from bench.lib.record import RESULTS, note_origin
from gckernels.testing.configurations import CONFIGURATIONS
from harness.machine_code import pipes
from harness.machine_code.kernel_table import (
    COLUMNS,
    VERSIONS,
    Row,
    made_with,
    read_table,
    regressions,
    rows,
    write_table,
)
from harness.machine_code.launches import collect

TABLE = RESULTS / "kernels.csv"
PIPES = RESULTS / "pipes.csv"


def print_table(table: list[Row], columns: tuple[str, ...]) -> None:
    lines = [{column: column for column in columns}, *table]
    widths = {column: max(len(line[column]) for line in lines) for column in columns if column not in VERSIONS}
    for line in lines:
        print("  ".join(line[column].ljust(width) for column, width in widths.items()).rstrip())


def report_kernels(update: bool) -> None:
    old, new = read_table(TABLE), rows(collect()["compiled"])
    print_table(new, COLUMNS)
    report_worse(TABLE, made_with(old), regressions(old, new))
    if update:
        write_table(TABLE, new)
        note_origin(TABLE)
        print("written:", TABLE.name)


def report_pipes(update: bool) -> None:
    old, new = pipes.read_table(PIPES), pipes.table([*CONFIGURATIONS, *pipes.POWERSGD])
    print_table(new, pipes.COLUMNS)
    report_worse(PIPES, made_with(old), pipes.busier(old, new))
    print(f"\nabove {pipes.BAR}:", *pipes.above_the_bar(new), sep="\n")
    if update:
        pipes.write_table(PIPES, new)
        note_origin(PIPES)
        print("written:", PIPES.name)


def report_worse(path: Path, made_with: str, worse: list[str]) -> None:
    if made_with not in ("", triton.__version__):
        print(f"\nnot compared: {path.name} was made with Triton {made_with}, this is {triton.__version__}")
    elif worse:
        print(f"\nregressions against {path.name}:", *worse, sep="\n")


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--pipes", action="store_true", help="leave the table of registers and accesses out")
    parser.add_argument("--update", action="store_true", help=f"write {TABLE.name} and {PIPES.name}")
    options = parser.parse_args()
    if not options.pipes:
        report_kernels(options.update)
    report_pipes(options.update)


if __name__ == "__main__":
    main()
