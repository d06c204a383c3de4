"""Messages that bring the shards of parameters to all ranks, exactly or encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from gckernels.batch import bind_decodes, bind_encodes
from gckernels.codec import Codec, Decoding, Encoding
from gckernels.ops import Identity

from ..communication.communicators import Communicators
from ..programs.layouts import Capabilities
from ..programs.named import ALLGATHER
from ..programs.spans import GATHER
from ..programs.stages import MessageKind, StageSpec, stages_of
from ..programs.topology import Topology
from ..resources.stage import Issue, Stage
from .collectives import bind_all_gather
from .message import Message
from .seeds import unit_seed


@dataclass(frozen=True)
class GatheredParameter:
    """The shards of a parameter that lie in the rows of a gather.

    Attributes:
        name: the parameter.
        start: the first element in a row.
        numel: the number of elements in a row.
        codec: encodes each shard; ``Identity`` sends it exactly, in fp32.
    """

    name: str
    start: int
    numel: int
    codec: Codec


class GatherMessage(Message):
    """Parameters whose shards all ranks get.

    Args:
        shares: the parameters, if they are encoded; none for rows that are sent as they are.
        rows: ``[ranks, numel]``. The own row holds the shards of this rank; the others, and encoded parts of the own
            one, become what is sent.
        room: ``uint8``, room for payloads, at least :func:`payload_nbytes` times the number of ranks and one.
        communicators: the process groups of this rank.
    """

    def __init__(
        self, shares: Sequence[GatheredParameter], rows: torch.Tensor, room: torch.Tensor, communicators: Communicators
    ) -> None:
        ranks, rank = communicators.world_size, communicators.rank
        link = communicators.link(0)
        self.keys = tuple(each.name for each in shares)
        self.compressors = tuple(dict.fromkeys(each.codec.name for each in shares))
        if not shares:
            exchange = bind_all_gather(link, rows[rank], rows)
            self.sent_nbytes = float((ranks - 1) * rows[rank].nbytes)
            self.stages = (_collective(_SPECS[1], exchange, self.sent_nbytes, rows.nbytes, rows.nbytes),)
            return
        nbytes = payload_nbytes(shares)
        sent, received = room[:nbytes], room[nbytes : (ranks + 1) * nbytes].view(ranks, 1, nbytes)
        encodings, decodings = [], []
        starts = accumulate((each.codec.payload_nbytes(each.numel) for each in shares), initial=0)
        for each, start in zip(shares, starts, strict=False):
            part = slice(start, start + each.codec.payload_nbytes(each.numel))
            pieces = [row[each.start : each.start + each.numel] for row in rows]
            seed = unit_seed("parameters", each.name, rank)
            encodings.append(Encoding(each.codec, pieces[rank], None, sent[None, part], seed))
            decodings += [
                Decoding(each.codec, received[owner : owner + 1, :, part], piece) for owner, piece in enumerate(pieces)
            ]
        self.sent_nbytes = float((ranks - 1) * nbytes)
        own_nbytes = rows[rank].nbytes
        exchange = bind_all_gather(link, sent, received.view(ranks, nbytes))
        encoding, gathering, decoding = _SPECS
        self.stages = (
            Stage(encoding, bind_encodes(encodings), 0.0, rows[rank].numel(), own_nbytes, nbytes),
            _collective(gathering, exchange, self.sent_nbytes, nbytes, received.numel()),
            Stage(decoding, bind_decodes(decodings), 0.0, rows.numel(), received.numel(), rows.nbytes),
        )


_SPECS = stages_of(MessageKind.ENCODED, ALLGATHER, Capabilities.of(Identity()), Topology(2), span=GATHER)


def payload_nbytes(shares: Sequence[GatheredParameter]) -> int:
    """The bytes that a rank sends to each other one."""
    return sum(each.codec.payload_nbytes(each.numel) for each in shares)


def _collective(spec: StageSpec, issue: Issue, sent_nbytes: float, read_nbytes: int, written_nbytes: int) -> Stage:
    return Stage(spec, lambda: issue()(), sent_nbytes, 0, read_nbytes, written_nbytes, issue=issue)
