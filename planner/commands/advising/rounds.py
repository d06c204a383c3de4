"""The time of a round of updates, measured on parameters of the same shapes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gckernels import sync
from gckernels.sync.communication.clocks import clock_of
from gckernels.sync.communication.ranks import Ranks

ROUNDS, UNCOUNTED = 3, 1
"""The rounds that are timed, and those before them, in which connections and memory are new."""


@dataclass(frozen=True)
class RoundCost:
    """The cost of the communication of a round on one rank."""

    round_s: float  # seconds, on the slowest rank
    sent_nbytes: float
    memory_nbytes: float  # residuals, and the parameters with which the round began


def round_cost(parameters: Sequence[torch.nn.Parameter], compressor: str, share: float, ranks: Ranks) -> RoundCost:
    """The cost of a round of updates of a model, whose parameters stay as they are. Collective.

    Args:
        parameters: the parameters of the model.
        compressor: the compressor of updates.
        share: the share of the rows of each parameter that is sent, from 0 to 1; the cost of all is in proportion.
        ranks: all ranks.
    """
    parts = torch.nn.ParameterList(_rows(each.detach(), share) for each in parameters)
    scale = sum(each.numel() for each in parameters) / sum(each.numel() for each in parts)
    optimizer = torch.optim.SGD(parts.parameters(), lr=1e-3)
    updates = sync.Updates(optimizer, compressor, every=1, scale_steps=False)
    attachment = sync.attach(parts, updates, process_group=ranks.group)
    clock, found = clock_of(ranks.device), []
    try:
        for _ in range(UNCOUNTED + ROUNDS):
            for each in parts:
                each.grad = each.detach().clone()
            ranks.meet()
            begun = clock.mark()
            optimizer.step()
            found.append(clock.seconds(begun, clock.mark()))
        begins_nbytes = sum(each.nbytes for each in parts)
        memory_nbytes = attachment.residual_nbytes() + begins_nbytes
        sent_nbytes = attachment.sent_nbytes_per_step()
    finally:
        attachment.close()
    (slowest_s,) = ranks.slowest([statistics.median(found[UNCOUNTED:])])
    return RoundCost(scale * slowest_s, scale * sent_nbytes, scale * memory_nbytes)


def _rows(values: torch.Tensor, share: float) -> torch.nn.Parameter:
    """A copy of the first rows of a parameter, at least one."""
    rows = values if not values.dim() else values[: max(round(share * len(values)), 1)]
    return torch.nn.Parameter(rows.clone())
