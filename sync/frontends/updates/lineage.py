"""The history of the anchors of a rank, by which ranks that come together know whose anchors they go on with.

Ranks count the means that have moved their anchors. When their group changes, they note a digest of the anchors at that
count. A rank that was away has anchors that the others have noted. One whose last mean has not arrived, because another
rank was lost in it, is one mean behind. One that is new has no means.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...communication.agreement import agreed, named
from ...communication.collectives import exchange_text
from ...plans.strides import in_reals

_NOTES = 64


@dataclass(frozen=True)
class _Standing:
    """The anchors of a rank when it joins others.

    Attributes:
        arrived: the number of means that have moved them.
        digest: a digest of the anchors.
        noted: the last digest that was noted before; empty if there is none.
        has_failed: whether the last mean has not arrived.
    """

    arrived: int
    digest: str
    noted: str
    has_failed: bool


@dataclass(frozen=True)
class Newest:
    """The rank with the newest anchors of those that come together.

    Attributes:
        rank: the rank in their group.
        arrived: the number of means that have moved its anchors.
        is_ahead: whether the last of these has the last update of this rank, on which it has not arrived.
    """

    rank: int
    arrived: int
    is_ahead: bool


class Lineage:
    """The number of means that have moved the anchors of a rank, and the digests that it has noted.

    Attributes:
        arrived: the number of means.
    """

    def __init__(self) -> None:
        self.arrived = 0
        self._notes: dict[int, str] = {}

    def newest(
        self, group: dist.ProcessGroup, device: torch.device, anchors: Iterable[torch.Tensor], has_failed: bool
    ) -> Newest:
        """The rank whose anchors all ranks of a group go on with. Collective.

        Args:
            group: the ranks that come together.
            device: a device whose tensors the group can send.
            anchors: the anchors of this rank.
            has_failed: whether its last mean has not arrived.

        Raises:
            RuntimeError: the anchors of some ranks have gone apart, or a rank has sent something else. Every rank
                raises.
        """
        own = _Standing(
            self.arrived, _digest(anchors), self._notes[max(self._notes)] if self._notes else "", has_failed
        )
        with named(group, "regroup: the comparison of rounds"):
            texts = exchange_text(group, device, json.dumps(vars(own)))
        standings = [_standing(*each) for each in enumerate(texts)]
        rank = max(range(len(standings)), key=lambda rank: (standings[rank].arrived, -rank))
        agreed("regroup", group, device, lambda: self._checked(standings, rank, dist.get_rank(group)))
        return Newest(rank, standings[rank].arrived, _is_behind(own, standings[rank]))

    def follow(self, newest: Newest, anchors: Iterable[torch.Tensor]) -> None:
        """Note that the anchors are those of another rank now."""
        self.arrived = newest.arrived
        self._notes[self.arrived] = _digest(anchors)
        self._notes = dict(sorted(self._notes.items())[-_NOTES:])

    def _checked(self, standings: Sequence[_Standing], newest: int, rank: int) -> tuple[bool, Sequence[str]]:
        """Nothing that ranks must agree on.

        Raises:
            RuntimeError: this rank has the newest anchors, and has never had those of another rank.
        """
        for each, standing in enumerate(standings if rank == newest else ()):
            if not self._knows(standing, standings[newest]):
                raise RuntimeError(
                    f"regroup: rank {each} of the group has other parameters than rank {newest} had after as many "
                    f"rounds: rank {each} has averaged updates without the others, or continues another job; let it "
                    "begin anew, with sync.attach over itself alone"
                )
        return True, [""]

    def _knows(self, other: _Standing, own: _Standing) -> bool:
        """Whether a rank has anchors that this one has had."""
        if other.arrived == 0 or _is_behind(other, own):
            return True
        return other.digest == (own.digest if other.arrived == own.arrived else self._notes.get(other.arrived))

    def state_dict(self) -> dict[str, Any]:
        return {"arrived": self.arrived, "notes": dict(self._notes)}

    def load(self, state: Any) -> None:
        """Continue from what :meth:`state_dict` has returned."""
        self.arrived, self._notes = int(state["arrived"]), {int(at): str(each) for at, each in state["notes"].items()}


def _standing(rank: int, text: str) -> _Standing:
    """The standing that a rank has sent. All ranks read the same text, and raise together."""
    try:
        standing = _Standing(**json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise RuntimeError(f"regroup: rank {rank} of the group has sent no standing, but {text!r:.80}") from error
    given = [type(each) for each in vars(standing).values()]
    if given != [int, str, str, bool] or standing.arrived < 0:
        raise RuntimeError(f"regroup: rank {rank} of the group has sent a damaged standing, {text!r:.160}")
    return standing


def _is_behind(one: _Standing, newest: _Standing) -> bool:
    """Whether a rank has missed the last mean of another one, with which it was in a group."""
    return one.has_failed and one.arrived == newest.arrived - 1 and one.noted == newest.noted


def _digest(anchors: Iterable[torch.Tensor]) -> str:
    sums = [in_reals(each.detach()).contiguous().view(-1).view(torch.int32).sum(dtype=torch.int64) for each in anchors]
    return hashlib.blake2b(str([int(each) for each in sums]).encode(), digest_size=8).hexdigest()
