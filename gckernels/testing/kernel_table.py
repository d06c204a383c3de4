"""What every kernel of every configuration compiles to, as a table: registers, memory, accesses, instructions.

The kernels are compiled ahead of time, so no GPU is needed; Triton brings its own assembler, so the table follows from
the release of Triton. A row is one kernel of one call of a configuration, for one compute capability:

- ``variant``: what is encoded or decoded, see ``VARIANTS`` in ``launches.py``;
- ``registers`` and ``stack_nbytes`` per thread (what was spilled is on the stack), ``shared_nbytes`` per program;
- ``instructions``: of the machine, static: a loop counts once, and every branch counts, that of the last, partial tile
  included; rounded up to a multiple of 8 by padding;
- ``instructions_per_element``: ``instructions`` times the threads of a program, over ``tile_numel``, the most elements
  that one load or store of the program addresses. It compares a kernel with its own past, not with other kernels, and
  is no measure of time;
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

Row = dict[str, str]  # as in the file: by column


def rows(records: list[dict]) -> list[Row]:
    """The table of the records of ``launches.py``, sorted."""
    table: dict[tuple, Row] = {}
    launched: Counter[tuple] = Counter()
    for record in records:
        where = tuple(record[name] for name in ("spec", "call", "variant", "kernel", "capability"))
        launched[where] += 1
        *call, kernel, capability = where
        if launched[where] > 1:  # a kernel that one call launches several times has a row for each
            kernel = f"{kernel} {launched[where]}"
        key = (*call, kernel, capability)
        facts = record | dict(zip(KEY, key, strict=True)) | VERSIONS
        facts["instructions_per_element"] = f"{record['instructions_per_element']:.4g}"
        facts["accesses"] = _accesses(record)
        table[key] = {column: str(facts[column]) for column in COLUMNS}
    return [table[key] for key in sorted(table)]


def _accesses(record: dict) -> str:
    counts: dict[str, Counter[int]] = {}  # by tensor and kind: instructions by bytes
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
    """Every row of ``new`` that is worse than its row in ``old``, and every row that the other table lacks; in words.

    Worse is more of ``LESS_IS_BETTER``, and an access that is narrower or was not there. What got better may stay as it
    is in ``old``, but is guarded only once that is updated.
    """
    before, now = ({tuple(row[column] for column in KEY): row for row in table} for table in (old, new))
    found = []
    for key, row in now.items():
        changes = _changes(before[key], row) if key in before else ["not in the table"]
        if changes:
            found.append(f"{_name(key)}: {', '.join(changes)}")
    return found + [f"{_name(key)}: in the table, but there is no such kernel" for key in before if key not in now]


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
    """``"grad load 16+2; ..."`` to ``{"grad load": "16+2", ...}``."""
    return {access: width for access, _, width in (each.rpartition(" ") for each in accesses.split("; ") if each)}


def _narrowness(width: str) -> tuple[int, int]:
    widest, _, narrower = width.partition("+")
    return -int(widest), int(narrower or 0)


# -------------------------------------------------------------------- the file


def read_table(path: Path) -> list[Row]:
    """The table in a file; no rows without one."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def made_with(table: list[Row]) -> str:
    """The version of Triton that the table is of; empty for an empty table."""
    return ", ".join(sorted({row["triton"] for row in table}))


def write_table(path: Path, table: list[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)
