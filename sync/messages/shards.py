"""Messages whose means end in shards, as FSDP2 has them.

The bucket has a row for each rank, ``[ranks, numel]``, in which the shards that the rank will have lie side by side.
Every rank encodes all rows with its own gradient, and sends each to its rank, which decodes them into its own row.
A residual has the elements of a parameter in their own order, so it does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from gckernels.batch import bind_decodes, bind_encodes
from gckernels.codec import Decoding, Encoding

from ..communication.communicators import Communicators
from ..plans.grouping import PlacedUnit
from ..programs.layouts import Capabilities
from ..programs.spans import SHARD
from ..programs.stages import MessageKind, stages_of
from ..programs.steps import Place
from ..programs.topology import Topology
from ..resources.feedback import Feedback
from ..resources.memory_spaces import Allocate
from ..resources.residual import EncodedForm, Residual
from ..resources.stage import Stage
from ..states.unsent import taken
from .codings import tensor_of, watched
from .collectives import bind_all_to_all
from .message import Message, compressor_names, compressor_of
from .seeds import Seeds


class ShardMessage(Message):
    """Units whose shards travel to their ranks.

    Args:
        units: the units, with the program :data:`~gckernels.sync.programs.named.SHARDS`, and where they lie in a row.
        rows: ``[ranks, numel]``, the gradient of this rank. Its own row becomes the mean.
        communicators: the process groups of this rank.
        feedback: the residuals.
        seeds: the seeds of the stochastic compressors.
        channel: channel of the communicators.
        allocate: makes the buffers; by default each has memory of its own.
    """

    def __init__(
        self,
        units: Sequence[PlacedUnit],
        rows: torch.Tensor,
        communicators: Communicators,
        feedback: Feedback,
        seeds: Seeds,
        channel: int = 0,
        allocate: Allocate | None = None,
    ) -> None:
        ranks, rank = communicators.world_size, communicators.rank
        self.keys, self.compressors = tuple(unit.plan.key for unit in units), compressor_names(units)
        self.channel = channel
        sizes = [unit.plan.compressor.round_nbytes(_row(unit), 0) for unit in units]  # full shards
        nbytes, new = ranks * sum(sizes), allocate or communicators.places.zeros
        sent = new((ranks, sum(sizes)), torch.uint8, Place.DEVICE)
        received = new((ranks, 1, sum(sizes)), torch.uint8, Place.DEVICE)
        keys, encodings, decodings = [], [], []
        residuals: list[Residual | None] = []
        for unit, start, size in zip(units, accumulate(sizes, initial=0), sizes, strict=False):
            method, row = compressor_of(unit), _row(unit)
            kept = None
            if unit.plan.has_residual("worker"):
                form = EncodedForm(ranks, row) if method.encodes_residuals else None
                kept = feedback.residual("worker", unit.plan.key, unit.plan.numel, form=form)
            for owner, first, last in shards_of(unit, ranks):
                piece = rows[owner, unit.start : unit.start + last - first]
                residuals.append(None if kept is None else kept.part(owner, row))
                seed = seeds.of("worker", rank, unit.plan.key, owner)
                payload = sent[owner : owner + 1, start : start + size]
                keys.append(unit.plan.key)
                encodings.append(Encoding(method, piece, tensor_of(residuals[-1]), payload, seed, row))
                if owner == rank:
                    decodings.append(Decoding(method, received[:, :, start : start + size], piece, row))
        encode = watched(feedback.watch, keys, encodings, residuals, bind_encodes(encodings, 1.0, seeds.added()))
        decode = bind_decodes(decodings, 1.0 / ranks) if decodings else lambda: None
        capabilities = Capabilities.of(units[0].plan.compressor)
        specs = stages_of(MessageKind.ENCODED, units[0].plan.program, capabilities, communicators.topology, span=SHARD)
        encoding, exchange, decoding = specs
        issue = bind_all_to_all(communicators.link(exchange.phase, channel=channel), sent, received)
        self.sent_nbytes = sum(sizes) * (ranks - 1.0)
        numel, own = rows.numel(), rows[0].numel()
        self.stages = (
            Stage(encoding, encode, 0.0, numel, rows.nbytes, nbytes),
            Stage(exchange, lambda: issue()(), self.sent_nbytes, numel, nbytes, nbytes, issue=issue),
            Stage(decoding, decode, 0.0, own, nbytes, rows.nbytes // ranks),
        )


def shards_of(unit: PlacedUnit, ranks: int) -> list[tuple[int, int, int]]:
    """The shards of a unit that are not empty: the rank of each, its first element in the unit, and the one behind its
    last."""
    row, numel = _row(unit), unit.plan.numel
    return [(rank, rank * row, min((rank + 1) * row, numel)) for rank in range(ranks) if rank * row < numel]


def add_unsent(units: Sequence[PlacedUnit], rows: torch.Tensor, rank: int, feedback: Feedback, copies: int = 1) -> None:
    """Add what the residuals of some units hold to the gradient of this rank, ``[ranks, numel]``, times ``copies``;
    they become zero."""
    ranks = rows.shape[0]
    for unit in units:
        for each in taken(unit.plan, Topology(ranks), rank, feedback):
            add_to_rows(unit, each.values, rows, each.weight * ranks * copies)


def add_to_rows(unit: PlacedUnit, values: torch.Tensor, rows: torch.Tensor, factor: float = 1.0) -> None:
    """Add ``factor * values``, ``fp32 [numel]`` in the order of the parameter, to the rows in which a unit lies."""
    for owner, first, last in shards_of(unit, rows.shape[0]):
        rows[owner, unit.start : unit.start + last - first].add_(values[first:last], alpha=factor)


def _row(unit: PlacedUnit) -> int:
    assert unit.row is not None
    return unit.row
