"""What an entry of a sparsifier takes, against the least that is possible: the table of ``docs/operators.md``.

    python -m bench.kernels.entries

The entropy is that of a choice of ``k`` among ``numel`` elements of which none is likelier than another, in bits per
entry. Bytes are those of the whole payload, per entry. Also written to ``bench/results/cpu/entries.csv``.
"""

from __future__ import annotations

import math

import torch

from bench.lib.record import write_csv
from bench.lib.rounds import markdown
from gckernels import TopK
from gckernels.toolkit.sparsifier.entries import VALUE_BITS

NUMEL = 2**24
RATIOS = (0.0001, 0.001, 0.01, 0.1, 0.25)


def entropy(numel: int, k: int) -> float:
    """``log2`` of the number of choices of ``k`` among ``numel`` elements, per entry."""
    return (math.lgamma(numel + 1) - math.lgamma(k + 1) - math.lgamma(numel - k + 1)) / math.log(2) / k


def row(ratio: float) -> dict[str, str]:
    """The row of the table for ``ratio``, the share of elements that is sent: bits and bytes per entry, by column."""
    compressors = [TopK(ratio=ratio, value_bits=bits) for bits in VALUE_BITS]
    k, layout = compressors[0].capacity(NUMEL), compressors[0].layout(NUMEL)
    index_bits = (layout["highs"].nbytes + layout["lows"].nbytes) * 8 / k
    found = {"ratio": f"{ratio:.2%}", "bits per index": f"{index_bits:.2f}", "entropy": f"{entropy(NUMEL, k):.2f}"}
    per_entry = {bits: each.payload_nbytes(NUMEL) / k for bits, each in zip(VALUE_BITS, compressors, strict=True)}
    return found | {f"bytes per entry, {bits}-bit values": f"{nbytes:.2f}" for bits, nbytes in per_entry.items()}


def table() -> str:
    """The rows of all :data:`RATIOS` in Markdown."""
    rows = [row(ratio) for ratio in RATIOS]
    return markdown(rows, list(rows[0]))


def main() -> None:
    print(table())
    print("wrote", write_csv("entries", torch.device("cpu"), map(row, RATIOS)))


if __name__ == "__main__":
    main()
