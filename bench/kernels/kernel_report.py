"""What every kernel of every configuration compiles to, as a table: registers, memory, accesses, instructions.

    python -m bench.kernels.kernel_report              # print it, and what is worse than in bench/results/kernels.csv
    python -m bench.kernels.kernel_report --update     # write that file as well

The columns are explained in ``gckernels/testing/kernel_table.py``.
"""

from __future__ import annotations

import argparse

import triton

from bench.lib.record import RESULTS
from gckernels.testing.kernel_table import COLUMNS, VERSIONS, Row, made_with, read_table, regressions, rows, write_table
from gckernels.testing.launches import collect

TABLE = RESULTS / "kernels.csv"


def print_table(table: list[Row]) -> None:
    lines = [{column: column for column in COLUMNS}, *table]
    widths = {column: max(len(line[column]) for line in lines) for column in COLUMNS if column not in VERSIONS}
    for line in lines:
        print("  ".join(line[column].ljust(width) for column, width in widths.items()).rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true", help=f"write {TABLE.name}")
    update = parser.parse_args().update
    old, new = read_table(TABLE), rows(collect()["compiled"])
    print_table(new)
    if made_with(old) not in ("", triton.__version__):
        print(f"\n{TABLE.name} is of Triton {made_with(old)}, this is {triton.__version__}: not compared")
    elif found := regressions(old, new):
        print(f"\nnot as {TABLE.name} has it:", *found, sep="\n")
    if update:
        write_table(TABLE, new)
        print("written:", TABLE.name)


if __name__ == "__main__":
    main()
