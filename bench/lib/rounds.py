"""Variants that are measured in turns within one process, each round against the baseline of the same round.

The speed of a machine drifts, and what else runs on it comes and goes; both meet all variants of a round alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
WIDTH, DEPTH = 1024, 7


def network(device: torch.device) -> torch.nn.Module:
    """The model that steps are measured with: 7.3 million parameters, the same at every call."""
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(DEPTH)]
    return torch.nn.Sequential(*layers).to(device)


def take_turns(arms: Mapping[str, Callable[[], T]], rounds: int, warm_up: int) -> dict[str, list[T]]:
    """Call every arm once in each round, in alternating order, on every rank behind a barrier.

    Args:
        arms: by name, the same on all ranks.
        rounds: that count.
        warm_up: rounds before them, the results of which are dropped.

    Returns:
        What each arm has returned, by round.
    """
    results: dict[str, list[T]] = {name: [] for name in arms}
    for round_ in range(warm_up + rounds):
        for name in list(arms) if round_ % 2 else reversed(arms):
            dist.barrier()
            result = arms[name]()
            if round_ >= warm_up:
                results[name].append(result)
    return results


def ratio_columns(values: Sequence[float], baseline: Sequence[float], what: str) -> dict[str, str]:
    """Median and quartiles of the ratios of each round, as columns ``what``, ``ratio_quartile_1`` and ``_3``.

    Args:
        values: two rounds or more.
        baseline: of the same rounds.
        what: the name of the median's column.
    """
    low, middle, high = statistics.quantiles([a / b for a, b in zip(values, baseline, strict=True)], n=4)
    return {what: f"{middle:.3f}", "ratio_quartile_1": f"{low:.3f}", "ratio_quartile_3": f"{high:.3f}"}


def markdown(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Some columns of ``rows`` as a table."""
    lines = [columns, ["---"] * len(columns), *([str(row[column]) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
