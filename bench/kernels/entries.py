"""The size of a sparsifier's entries against the theoretical minimum: the table of ``docs/operators.md``.

    python -m bench.kernels.entries

The entropy, in bits per entry, is that of choosing ``k`` among ``numel`` elements with equal probability. Bytes per
entry are those of the whole payload. Writes ``bench/results/cpu/entries.csv``.
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
    """Bits per entry: ``log2`` of the number of ways to choose ``k`` among ``numel`` elements, divided by ``k``."""
    return (math.lgamma(numel + 1) - math.lgamma(k + 1) - math.lgamma(numel - k + 1)) / math.log(2) / k


def row(ratio: float) -> dict[str, str]:
    """A row of the table, by column: bits and bytes per entry if the share ``ratio`` of the elements is sent."""
    compressors = [TopK(ratio=ratio, value_bits=bits) for bits in VALUE_BITS]
    k, layout = compressors[0].capacity(NUMEL), compressors[0].layout(NUMEL)
    index_bits = (layout["highs"].nbytes + layout["lows"].nbytes) * 8 / k
    columns = {"ratio": f"{ratio:.2%}", "bits per index": f"{index_bits:.2f}", "entropy": f"{entropy(NUMEL, k):.2f}"}
    per_entry = {bits: each.payload_nbytes(NUMEL) / k for bits, each in zip(VALUE_BITS, compressors, strict=True)}
    return columns | {f"bytes per entry, {bits}-bit values": f"{nbytes:.2f}" for bits, nbytes in per_entry.items()}


def table() -> str:
    """The table for all :data:`RATIOS` in Markdown."""
    rows = [row(ratio) for ratio in RATIOS]
    return markdown(rows, list(rows[0]))


def main() -> None:
    print(table())
    print("wrote", write_csv("entries", torch.device("cpu"), map(row, RATIOS)))


if __name__ == "__main__":
    main()
