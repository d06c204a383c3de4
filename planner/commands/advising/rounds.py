"""The cost of rounds of updates, measured on parameters of the same shapes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gckernels import sync
from gckernels.sync.communication.clocks import clock_of
from gckernels.sync.communication.ranks import Ranks

from .averagings import Averaging

ROUNDS, UNCOUNTED = 3, 1
"""The rounds that are timed, and those before them, in which connections and memory are new."""


@dataclass(frozen=True)
class RoundCost:
    """The cost of rounds in a training step, as a mean over the steps of a round."""

    step_s: float  # seconds, on the slowest rank
    sent_nbytes: float
    memory_nbytes: float  # residuals, and the parameters with which the round began


def round_cost(
    parameters: Sequence[torch.nn.Parameter], averaging: Averaging, normalises: bool, share: float, ranks: Ranks
) -> RoundCost:
    """The cost of rounds of updates of a model, whose parameters stay as they are. Collective.

    Args:
        parameters: the parameters of the model.
        averaging: the way in which updates are averaged.
        normalises: whether the optimizer that steps them is one like Adam.
        share: the share of the rows of each parameter that is sent, from 0 to 1; the cost of all is in proportion.
        ranks: all ranks.
    """
    parts = torch.nn.ParameterList(_rows(each.detach(), share) for each in parameters)
    scale = sum(each.numel() for each in parameters) / sum(each.numel() for each in parts)
    makes = torch.optim.AdamW if normalises else torch.optim.SGD
    optimizer = makes(parts.parameters(), lr=1e-4)
    alone_s = _round_s(parts, optimizer, averaging.every, ranks)
    scales = averaging.scales and normalises
    updates = sync.Updates(optimizer, averaging.compressor, every=averaging.every, scale_steps=scales)
    attachment = sync.attach(parts, updates, process_group=ranks.group)
    try:
        round_s = _round_s(parts, optimizer, averaging.every, ranks)
        memory_nbytes = attachment.residual_nbytes() + sum(each.nbytes for each in parts)
        sent_nbytes = attachment.sent_nbytes_per_step() / averaging.every
    finally:
        attachment.close()
    return RoundCost(scale * max(round_s - alone_s, 0.0) / averaging.every, scale * sent_nbytes, scale * memory_nbytes)


def _round_s(parts: torch.nn.ParameterList, optimizer: torch.optim.Optimizer, every: int, ranks: Ranks) -> float:
    """The median seconds of the steps of an optimizer in a round, on the slowest rank."""
    clock, found = clock_of(ranks.device), []
    for each in parts:
        each.grad = torch.randn_like(each)
    for _ in range(UNCOUNTED + ROUNDS):
        ranks.meet()
        begun = clock.mark()
        for _ in range(every):
            optimizer.step()
        found.append(clock.seconds(begun, clock.mark()))
    (slowest_s,) = ranks.slowest([statistics.median(found[UNCOUNTED:])])
    return slowest_s


def _rows(values: torch.Tensor, share: float) -> torch.nn.Parameter:
    """A copy of the first rows of a parameter, at least one."""
    rows = values if not values.dim() else values[: max(round(share * len(values)), 1)]
    return torch.nn.Parameter(rows.clone())
