"""Spans: the states of the data between which a program goes.

The gradients of a DDP model begin as those of each rank and end as their mean on every rank. FSDP2 shards its
parameters, so there the mean ends in shards (:data:`SHARD`), and the parameters go from shards back to the whole
(:data:`GATHER`). The rules of :mod:`.rules` are the same for all spans.
"""

from __future__ import annotations

from dataclasses import dataclass

from .rules import COMPLETE, START, Flow, Opened
from .steps import Level

_FLAT, _LEVELS = COMPLETE


@dataclass(frozen=True)
class Span:
    """The states between which programs go."""

    begin: Flow  # the state in which they begin
    opened: tuple[Opened, ...]
    """The levels that are still to be gathered where they end. All ranks have contributed there, and the data is not
    encoded."""
    end: str  # the data at the end, for people

    def ends_at(self, flow: Flow) -> bool:
        """Whether programs may end with a flow."""
        return flow.complete and not flow.encoded and flow.opened == self.opened


_ONE, _INSIDE = (Opened(Level.FLAT, True),), (Opened(Level.INTRA, True),)
_BOTH = (*_INSIDE, Opened(Level.INTER, True))

MEAN = Span(START, (), "the averaged unit on every rank")
"""Gradients of DDP models and bare modules."""
SHARD = Span(START, _ONE, "a shard of the averaged unit on every rank")
"""Gradients of FSDP2 over all ranks: each rank gets the mean of its shard."""
SHARD_OF_LEVELS = Span(START, _BOTH, "a shard of the averaged unit on every rank, cut inside the machines first")
"""Gradients of FSDP2 over all ranks, which are in machines."""
SHARD_INSIDE = Span(START, _INSIDE, "a shard of the averaged unit on every device, the same in all machines")
"""Gradients of HSDP, whose shards are inside the machines and whose replicas are between them."""
GATHER = Span(Flow(merged=_FLAT, opened=_ONE), (), MEAN.end)
"""Parameters of FSDP2 over all ranks: every rank gets all shards."""
GATHER_OF_LEVELS = Span(Flow(merged=_LEVELS, opened=_BOTH), (), MEAN.end)
"""Parameters of FSDP2 over all ranks, which are in machines."""
