"""Tables of aligned columns, for people."""

from __future__ import annotations

from collections.abc import Sequence

GAP = "  "


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """The lines of a table, its columns aligned.

    Args:
        head: the titles of the columns; the last columns of a row may be missing.
        rows: the cells.
        left: the indices of the columns that are aligned at their left; all others are at their right.
    """
    lines = [head, *rows]
    widths = [max(len(line[index]) for line in lines if index < len(line)) for index in range(len(head))]
    return "\n".join(
        GAP.join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=False))
        ).rstrip()
        for line in lines
    )


def shortened(name: str, width: int) -> str:
    """A long name without its middle; names of parameters differ at both ends."""
    if len(name) <= width:
        return name
    half = (width - 2) // 2
    return f"{name[:half]}..{name[-(width - 2 - half) :]}"
