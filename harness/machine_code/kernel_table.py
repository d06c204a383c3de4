"""Table of every kernel of every configuration as compiled: registers, memory, accesses, instructions.

The kernels are compiled ahead of time, so no GPU is needed. Triton has its own assembler, so the table depends only on
the release of Triton. A row is one kernel of one call of a configuration, for one compute capability:

- ``variant``: the tensors of the call, see ``VARIANTS`` in ``launches.py``;
- ``registers`` and ``stack_nbytes`` per thread (spilled registers are on the stack), ``shared_nbytes`` per program;
- ``instructions``: machine instructions in the kernel's text. A loop counts once, and every branch counts, including
  that of the last, partial tile. Padding rounds the number up to a multiple of 8;
- ``instructions_per_element``: ``instructions`` times the threads of a program, over ``tile_numel``, the maximum number
  of elements that one load or store of the program addresses. It compares a kernel with earlier versions of itself, not
  with other kernels, and does not measure time;
- ``accesses`` to the gradient, the residual and the output: ``grad load 16+2`` means that the widest loads of the
  gradient have 16 bytes per thread, and that two instructions load fewer at a time.
"""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path

import torch
import triton

KEY = ("configuration", "call", "variant", "kernel", "capability")
LESS_IS_BETTER = ("registers", "stack_nbytes", "shared_nbytes", "instructions", "instructions_per_element")
COLUMNS = (*KEY, "num_warps", "tile_numel", *LESS_IS_BETTER, "accesses", "torch", "triton")
VERSIONS = {"torch": torch.__version__.partition("+")[0], "triton": triton.__version__}

Row = dict[str, str]  # by column, as in the file


def rows(records: list[dict]) -> list[Row]:
    """Rows of the table, sorted, from the records of ``launches.py``."""
    table: dict[tuple, Row] = {}
    launched: Counter[tuple] = Counter()
    for record in records:
        where = tuple(record[name] for name in ("spec", "call", "variant", "kernel", "capability"))
        launched[where] += 1
        *call, kernel, capability = where
        if launched[where] > 1:  # a kernel that a call launches several times has a row for each launch
            kernel = f"{kernel} {launched[where]}"
        key = (*call, kernel, capability)
        facts = record | dict(zip(KEY, key, strict=True)) | VERSIONS
        facts["instructions_per_element"] = f"{record['instructions_per_element']:.4g}"
        facts["accesses"] = _accesses(record)
        table[key] = {column: str(facts[column]) for column in COLUMNS}
    return [table[key] for key in sorted(table)]


def _accesses(record: dict) -> str:
    counts: dict[str, Counter[int]] = {}  # numbers of instructions by bytes, by tensor and kind
    for tensor, arguments in record["tensors"].items():
        for access in record["accesses"]:
            if access["argument"] in arguments:
                counts.setdefault(f"{tensor} {access['kind']}", Counter())[access["nbytes"]] += access["count"]
    found = []
    for name, by_nbytes in counts.items():
        widest = max(by_nbytes)
        narrower = by_nbytes.total() - by_nbytes[widest]
        found.append(f"{name} {widest}" + (f"+{narrower}" if narrower else ""))
    return "; ".join(found)


# -------------------------------------------------------------------- comparison


def regressions(old: list[Row], new: list[Row]) -> list[str]:
    """Descriptions of rows of ``new`` that are worse than in ``old``, and of rows that only one of the tables has.

    A row is worse if a column of ``LESS_IS_BETTER`` is larger, or if an access is narrower or new. Improvements need no
    update of ``old``, but they are not guarded until then.
    """
    before, now = ({tuple(row[column] for column in KEY): row for row in table} for table in (old, new))
    found = []
    for key, row in now.items():
        changes = _changes(before[key], row) if key in before else ["not in the table"]
        if changes:
            found.append(f"{_name(key)}: {', '.join(changes)}")
    return found + [f"{_name(key)}: in the table, but no such kernel is launched" for key in before if key not in now]


def _name(key: tuple[str, ...]) -> str:
    *names, capability = key
    return ", ".join([*names, f"sm_{capability}"])


def _changes(old: Row, new: Row) -> list[str]:
    changes = [f"{fact} {old[fact]} -> {new[fact]}" for fact in LESS_IS_BETTER if float(new[fact]) > float(old[fact])]
    before = _widths(old["accesses"])
    for access, width in _widths(new["accesses"]).items():
        if access not in before:
            changes.append(f"{access} none -> {width}")
        elif _narrowness(width) > _narrowness(before[access]):
            changes.append(f"{access} {before[access]} -> {width}")
    return changes


def _widths(accesses: str) -> dict[str, str]:
    """Widths by access: ``{"grad load": "16+2", ...}`` for ``"grad load 16+2; ..."``."""
    return {access: width for access, _, width in (each.rpartition(" ") for each in accesses.split("; ") if each)}


def _narrowness(width: str) -> tuple[int, int]:
    widest, _, narrower = width.partition("+")
    return -int(widest), int(narrower or 0)


# -------------------------------------------------------------------- the file


def read_table(path: Path) -> list[Row]:
    """The table in a file; an empty list if there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def made_with(table: list[Row]) -> str:
    """The version of Triton that compiled the kernels of the table; empty for an empty table."""
    return ", ".join(sorted({row["triton"] for row in table}))


def write_table(path: Path, table: list[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
