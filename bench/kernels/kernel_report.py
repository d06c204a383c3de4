"""Table of every kernel of every configuration as compiled: registers, memory, accesses, instructions.

    python -m bench.kernels.kernel_report              # print the table, and its regressions against the recorded one
    python -m bench.kernels.kernel_report --update     # also record it in bench/results/kernels.csv

``gckernels/testing/kernel_table.py`` documents the columns.
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
        print(f"\nnot compared: {TABLE.name} was made with Triton {made_with(old)}, this is {triton.__version__}")
    elif worse := regressions(old, new):
        print(f"\nregressions against {TABLE.name}:", *worse, sep="\n")
    if update:
        write_table(TABLE, new)
        print("written:", TABLE.name)


if __name__ == "__main__":
    main()
