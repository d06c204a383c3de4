"""Messages that bring the shards of parameters to all ranks: exactly, encoded, or as encoded differences.

A difference is that to a copy of all parameters, which each rank keeps and which is the same on all ranks. Its error is
a part of the next difference (SDP4Bit, Jia et al., NeurIPS 2024)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch

from gckernels.batch import bind_decodes, bind_encodes
from gckernels.codec import Codec, Decoding, Encoding
from gckernels.ops import Identity

from ..communication.communicators import Communicators
from ..programs.layouts import Capabilities
from ..programs.named import ALLGATHER
from ..programs.spans import GATHER
from ..programs.stages import MessageKind, stages_of
from ..programs.steps import Place
from ..programs.topology import Topology
from ..resources.memory_spaces import Allocate
from ..resources.stage import Stage
from ..resources.workers import Work
from .collectives import bind_all_gather
from .message import Message
from .seeds import unit_seed


@dataclass(frozen=True)
class GatheredParameter:
    """The shards of a parameter that lie in the rows of a gather."""

    name: str  # the parameter
    start: int  # the first element in a row
    numel: int  # the number of elements in a row
    codec: Codec  # encodes each shard; Identity sends it exactly, in fp32


class GatherMessage(Message):
    """Parameters whose shards all ranks get.

    Args:
        parameters: the parameters, if they are encoded; none for rows that are sent as they are.
        rows: ``[ranks, numel]``. The own row holds the shards of this rank; the others, and encoded parts of the own
            one, become what is sent.
        communicators: the process groups of this rank.
        copy: ``fp32 [ranks, numel]``, a copy of all rows that is the same on all ranks. Encoded parameters are sent as
            differences to it, and added to it; rows that are sent as they are become the copy.
        allocate: makes the buffers; by default each has memory of its own.
    """

    def __init__(
        self,
        parameters: Sequence[GatheredParameter],
        rows: torch.Tensor,
        communicators: Communicators,
        copy: torch.Tensor | None = None,
        allocate: Allocate | None = None,
    ) -> None:
        new = allocate or communicators.places.zeros
        self._rows, self._copy, self._rank = rows, copy, communicators.rank
        self._link = communicators.link(0)
        self.keys = tuple(each.name for each in parameters)
        self.compressors = tuple(dict.fromkeys(each.codec.name for each in parameters))
        self.stages = self._encoded(parameters, new) if parameters else self._exact()
        self.sent_nbytes = sum(stage.sent_nbytes for stage in self.stages)

    def _exact(self) -> tuple[Stage, ...]:
        """The stages of rows that are sent as they are."""
        rows, copy = self._rows, self._copy
        gather = self._collective(rows[self._rank], rows, rows.nbytes)
        if copy is None:
            return (gather,)
        return (gather, Stage(_SPECS[2], lambda: copy.copy_(rows), 0.0, rows.numel(), rows.nbytes, copy.nbytes))

    def _encoded(self, parameters: Sequence[GatheredParameter], new: Allocate) -> tuple[Stage, ...]:
        """The stages of encoded parameters."""
        rows, copy, rank, ranks = self._rows, self._copy, self._rank, self._link.ranks
        nbytes = payload_nbytes(parameters)
        sent = new((nbytes,), torch.uint8, Place.DEVICE)
        received = new((ranks, 1, nbytes), torch.uint8, Place.DEVICE)
        source = rows[rank] if copy is None else new(copy[rank].shape, torch.float32, Place.DEVICE)
        target = rows if copy is None else copy
        encodings, decodings, differences = [], list[Decoding](), list[Decoding]()
        starts = accumulate((each.codec.payload_nbytes(each.numel) for each in parameters), initial=0)
        for each, start in zip(parameters, starts, strict=False):
            payload = slice(start, start + each.codec.payload_nbytes(each.numel))
            part = slice(each.start, each.start + each.numel)
            is_difference = copy is not None and each.codec != Identity()
            piece = source[part] if is_difference else rows[rank, part]
            seed = unit_seed("parameters", each.name, rank)
            encodings.append(Encoding(each.codec, piece, None, sent[None, payload], seed))
            (differences if is_difference else decodings).extend(
                Decoding(each.codec, received[owner : owner + 1, :, payload], target[owner, part])
                for owner in range(ranks)
            )
        encode: Work = bind_encodes(encodings)
        decode: Work = bind_decodes(decodings) if decodings else _nothing
        if copy is not None:
            encode = partial(_encode_difference, rows[rank], copy[rank], source, encode)
            add = bind_decodes(differences, accumulate=True) if differences else _nothing
            decode = partial(_add_differences, decode, add, copy, rows)
        numel, own_nbytes = rows[rank].numel(), rows[rank].nbytes
        return (
            Stage(_SPECS[0], encode, 0.0, numel, own_nbytes, nbytes),
            self._collective(sent, received.view(ranks, nbytes), nbytes),
            Stage(_SPECS[2], decode, 0.0, rows.numel(), received.numel(), rows.nbytes),
        )

    def _collective(self, sent: torch.Tensor, received: torch.Tensor, read_nbytes: int) -> Stage:
        issue = bind_all_gather(self._link, sent, received)
        sent_nbytes = float((self._link.ranks - 1) * sent.nbytes)
        return Stage(_SPECS[1], lambda: issue()(), sent_nbytes, 0, read_nbytes, received.nbytes, issue=issue)


def _encode_difference(row: torch.Tensor, copy: torch.Tensor, difference: torch.Tensor, encode: Work) -> None:
    torch.sub(row, copy, out=difference)
    encode()


def _add_differences(replace: Work, add: Work, copy: torch.Tensor, rows: torch.Tensor) -> None:
    replace()
    add()
    rows.copy_(copy)


def _nothing() -> None:
    pass


_SPECS = stages_of(MessageKind.ENCODED, ALLGATHER, Capabilities.of(Identity()), Topology(2), span=GATHER)


def payload_nbytes(parameters: Sequence[GatheredParameter]) -> int:
    """The bytes that a rank sends to each other one."""
    return sum(each.codec.payload_nbytes(each.numel) for each in parameters)
