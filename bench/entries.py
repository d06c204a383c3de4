"""What an entry of a sparsifier takes, against the least that is possible: the table of ``docs/operators.md``.

    python bench/entries.py

The entropy is that of a choice of ``k`` among ``numel`` elements of which none is likelier than another, in bits per
entry. Bytes are those of the whole payload, per entry.
"""

from __future__ import annotations

import math

from gckernels import TopK
from gckernels.toolkit.sparse_entries import VALUE_BITS

NUMEL = 2**24
RATIOS = (0.0001, 0.001, 0.01, 0.1, 0.25)


def entropy(numel: int, k: int) -> float:
    """``log2`` of the number of choices of ``k`` among ``numel`` elements, per entry."""
    return (math.lgamma(numel + 1) - math.lgamma(k + 1) - math.lgamma(numel - k + 1)) / math.log(2) / k


def table() -> str:
    """The table in Markdown."""
    values = [f"{bits}-bit values" for bits in VALUE_BITS]
    lines = [
        f"| ratio | bits per index | entropy | bytes per entry, {' | '.join(values)} |",
        f"| --- | --- | --- | {' | '.join('---' for _ in VALUE_BITS)} |",
    ]
    for ratio in RATIOS:
        compressors = [TopK(ratio=ratio, value_bits=bits) for bits in VALUE_BITS]
        k = compressors[0].capacity(NUMEL)
        layout = compressors[0].layout(NUMEL)
        index_bits = (layout["highs"].nbytes + layout["lows"].nbytes) * 8 / k
        per_entry = [f"{compressor.payload_nbytes(NUMEL) / k:.2f}" for compressor in compressors]
        lines.append(f"| {ratio:.2%} | {index_bits:.2f} | {entropy(NUMEL, k):.2f} | {' | '.join(per_entry)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
