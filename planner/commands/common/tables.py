"""Tables of aligned columns, for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

GAP = "  "


def table(rows: Iterable[T], columns: Mapping[str, Callable[[T], str]], left: Sequence[int] = (0,)) -> str:
    """The lines of a table, its columns aligned.

    Args:
        rows: the things in its rows.
        columns: for the title of each column the text in a row.
        left: the indices of the columns that are aligned at their left; all others are at their right.
    """
    lines = [[*columns], *([text(row) for text in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        GAP.join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def shortened(name: str, width: int) -> str:
    """A long name without its middle; names of parameters differ at both ends."""
    if len(name) <= width:
        return name
    half = (width - 2) // 2
    return f"{name[:half]}..{name[-(width - 2 - half) :]}"
