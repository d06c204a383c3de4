"""Memory bandwidth of this GPU for copies, reads and writes, by size: the upper bound of every kernel.

Writes ``bandwidth.csv``. ``gb_per_s`` counts bytes read and bytes written; ``in_l2`` marks data that stays in the L2
cache.
"""

from __future__ import annotations

import torch

from bench.gpu.parts import Result
from bench.lib.budget import Budget
from bench.lib.card import Card
from bench.lib.record import csv_path, merge_csv

SIZES_NBYTES = tuple(2**power for power in range(20, 33, 2))
OPERATIONS = ("copy", "read", "write")
MAX_HELD_NBYTES = 2**35
KEY = ("operation", "nbytes")


def measure(budget: Budget) -> Result:
    """Measure gigabytes per second by operation and size; the result is a table."""
    card = Card()
    csv_path("bandwidth", card.device).unlink(missing_ok=True)
    table = ["bytes          " + "".join(f"{operation:>12}" for operation in OPERATIONS) + "   GB/s"]
    best = 0.0
    for nbytes in SIZES_NBYTES:
        if not budget.allows(f"{nbytes} bytes", 3.0):
            continue
        line = f"{nbytes:<15}"
        for operation in OPERATIONS:
            row = _row(card, operation, nbytes)
            merge_csv("bandwidth", card.device, [row], KEY)
            line += f"{row['gb_per_s']:>12}"
            best = max(best, 0.0 if row["in_l2"] or operation != "copy" else float(row["gb_per_s"]))
        table.append(line + ("   in L2" if row["in_l2"] else ""))
    return Result(True, [f"copy at most {best:.0f} GB/s outside the cache", *table])


def _row(card: Card, operation: str, nbytes: int) -> dict[str, str]:
    torch.cuda.empty_cache()
    touched = 2 * nbytes if operation == "copy" else nbytes
    sets = min(card.num_sets(touched), max(1, MAX_HELD_NBYTES // touched))
    tensors = [torch.ones(2, nbytes // 4, device=card.device) for _ in range(sets)]
    calls = {
        "copy": [lambda pair=pair: pair[1].copy_(pair[0]) for pair in tensors],
        "read": [lambda pair=pair: pair[0].sum() for pair in tensors],
        "write": [lambda pair=pair: pair[0].fill_(2.0) for pair in tensors],
    }
    timing = card.time(calls[operation])
    return {
        "operation": operation,
        "nbytes": str(nbytes),
        "in_l2": "yes" if card.stays_in_l2(touched, sets) else "",
        "timing": timing.how,
        "median_s": f"{timing.median_s:.4g}",
        "quartile_1_s": f"{timing.low_s:.4g}",
        "quartile_3_s": f"{timing.high_s:.4g}",
        "gb_per_s": f"{touched / timing.median_s / 1e9:.4g}",
    }
