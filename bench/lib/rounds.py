"""Measurement of variants in turns within one process, each round relative to the baseline of the same round.

The speed of a machine drifts, and other work on it comes and goes; both affect all variants of a round alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

CPU = torch.device("cpu")


def take_turns(arms: Mapping[str, Callable[[], T]], rounds: int, warm_up: int) -> dict[str, list[T]]:
    """Call every arm once in each round, in alternating order; on every rank after a barrier, if there are ranks.

    Args:
        arms: functions by name, with the same names on all ranks.
        rounds: number of rounds whose results are returned.
        warm_up: number of rounds before them, whose results are dropped.

    Returns:
        The results of each arm by name, in the order of the rounds.
    """
    results: dict[str, list[T]] = {name: [] for name in arms}
    for round_ in range(warm_up + rounds):
        for name in list(arms) if round_ % 2 else reversed(list(arms)):
            if dist.is_initialized():
                dist.barrier()
            result = arms[name]()
            if round_ >= warm_up:
                results[name].append(result)
    return results


def slowest(rounds: Sequence[Sequence[float]]) -> torch.Tensor:
    """The largest values over all ranks, ``[rounds, values]``; collective."""
    values = torch.tensor(rounds, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


def rounds_within(budget_s: float, round_s: float, least: int, most: int) -> int:
    """The number of rounds that fit into a budget, given the seconds of one on this rank; collective."""
    return min(most, max(least, round(budget_s / float(slowest([(round_s,)])))))


def turns_within(arms: Mapping[str, Callable[[], T]], budget_s: float, least: int, most: int) -> dict[str, list[T]]:
    """The results of as many rounds as fit into a budget, judged by one more before them; collective."""
    start_s = time.monotonic()
    take_turns(arms, 0, 1)
    return take_turns(arms, rounds_within(budget_s, time.monotonic() - start_s, least, most), 0)


def seconds(call: Callable[[], object], device: torch.device = CPU) -> float:
    """Seconds until the work of one call is done."""
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def ratio_columns(values: Sequence[float], baseline: Sequence[float], what: str) -> dict[str, str]:
    """Columns with median and quartiles of the ratios of ``values`` to ``baseline``, round by round.

    Args:
        values: measurements of two rounds or more.
        baseline: measurements of the same rounds.
        what: name of the median's column; the others are ``ratio_quartile_1`` and ``ratio_quartile_3``.
    """
    low, middle, high = statistics.quantiles([a / b for a, b in zip(values, baseline, strict=True)], n=4)
    return {what: f"{middle:.3f}", "ratio_quartile_1": f"{low:.3f}", "ratio_quartile_3": f"{high:.3f}"}


def markdown(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """The given columns of ``rows`` as a Markdown table."""
    return markdown_of_cells(columns, ([str(row[column]) for column in columns] for row in rows))


def markdown_of_cells(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns may share names."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))
