"""Words of ranks to each other when a collective has failed: which ranks have not taken part, and where others are.

The store of the job carries it, and nothing is written there before a failure. Each rank that fails leaves one word:
the step, the collective, and the error of its transport. It then waits a moment for the words of the others. A rank
that has left none is gone, or busy with something else.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..programs.steps import Level
from .collectives import CONSEQUENCES
from .communicators import Communicators
from .links import PEER

PATIENCE_S = 1.0
"""Seconds for which a rank waits for the words of others."""
_KNOWING_PATIENCE_S = 0.2  # if the transport has said which rank is gone
_STORE_PATIENCE_S = 1.0
_POLL_S = 0.02
_WORD_NBYTES = 4096
_SHOWN, _NAME_CHARS, _CHARS = 3, 80, 300
_CLOSED, _LATE, _OTHER = "closed", "late", "other"


@dataclass(frozen=True)
class Word:
    """The word of a rank about its failure."""

    rank: int  # the rank, numbered as in the job
    what: str  # the collective in which it has failed, such as "AllToAll"; "" if it has failed outside of one
    names: str  # the names of everything that is sent there
    step: int | None  # the training step; None if it belongs to none
    kind: str
    """``"closed"`` if its connections have been closed, ``"late"`` if nothing has come in time, ``"other"`` if
    something else has happened."""
    peer: int  # the rank for which it has waited, if that is known; -1 otherwise
    error: str  # the text of the error

    @classmethod
    def of(cls, rank: int, what: str, names: Sequence[str], step: int | None, error: BaseException) -> Word:
        """The word of a rank about an error."""
        text = str(error)
        shown = ", ".join(_cut(name, _NAME_CHARS) for name in names[:_SHOWN])
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        peer = int(getattr(error, PEER, -1))
        return cls(rank, what, shown + more, step, _kind_of(text), peer, _cut(f"{type(error).__name__}: {text}"))

    @classmethod
    def read(cls, text: bytes) -> Word | None:
        """The word in a text of another rank; ``None`` if there is none."""
        try:
            entries = json.loads(text) if len(text) <= _WORD_NBYTES else {}
            step = None if entries["step"] is None else int(entries["step"])
            what, names, kind, error = (_cut(str(entries[name])) for name in ("what", "names", "kind", "error"))
            return cls(int(entries["rank"]), what, names, step, kind, int(entries["peer"]), error)
        except (ValueError, TypeError, KeyError):
            return None

    @property
    def place(self) -> str:
        """The collective with what is sent in it, such as ``"AllToAll of layers.3.weight in step 214"``."""
        return f"{self.what}{self.names and f' of {self.names}'}{self._when}"

    @property
    def part(self) -> str:
        """The things that others wait for, such as ``"its part of layers.3.weight (AllToAll) in step 214"``."""
        return f"its part of {f'{self.names} ({self.what})' if self.names else self.what}{self._when}"

    @property
    def _when(self) -> str:
        return "" if self.step is None else f" in step {self.step}"

    @property
    def as_cause(self) -> str:
        """The failure, for ranks that have failed because of it."""
        where = f" in {self.place}" if self.what else self._when
        return f"rank {self.rank} has failed{where}: {self.error}"


class Report:
    """The words of all ranks of a collective about its failure. A thread collects it, so that nothing is held up.

    Args:
        name: a name that no other failure of these ranks has.
        own: the word of this rank.
        ranks: the ranks that take part in the collective, numbered as in the job.
    """

    def __init__(self, name: str, own: Word, ranks: Collection[int]) -> None:
        self._key, self._own, self._others = f"gckernels/failed/{name}", own, sorted({*ranks} - {own.rank})
        self._words: dict[int, Word] = {}
        self._is_complete = False  # all words that there are have been read
        self._thread = threading.Thread(target=self._exchange, name="gckernels-report", daemon=True)
        self._thread.start()

    def _exchange(self) -> None:
        with suppress(Exception):  # the store may be gone with the rank that has it
            store, own, read = _own_store(), self._own, 0
            store.set(f"{self._key}/{store.add(self._key, 1)}", json.dumps(asdict(own)))
            knows = own.kind == _CLOSED and (own.peer >= 0 or len(self._others) == 1)
            until_s = time.monotonic() + (_KNOWING_PATIENCE_S if knows else PATIENCE_S)
            while own.what:
                count = store.add(self._key, 0)
                while read < count and store.check([f"{self._key}/{read + 1}"]):
                    read += 1
                    if (word := Word.read(store.get(f"{self._key}/{read}"))) is not None and word.rank != own.rank:
                        self._words[word.rank] = word
                self._is_complete = read == count
                if self._words.keys() >= {*self._others} or time.monotonic() > until_s:
                    return
                time.sleep(_POLL_S)

    def text(self) -> str:
        """A sentence of what has happened, as far as it is known; ``""`` if the error itself says it. Waits for two
        seconds at most."""
        if not self._own.what:
            return ""
        self._thread.join(PATIENCE_S + _STORE_PATIENCE_S)
        return described(self._own, dict(self._words), self._others, self._is_complete)


def described(own: Word, words: Mapping[int, Word], others: Collection[int], is_complete: bool) -> str:
    """A sentence of what has happened in a collective that has failed.

    Args:
        own: the word of this rank.
        words: the words of other ranks.
        others: the other ranks of the collective.
        is_complete: whether all words that there are have been read; otherwise nothing is known of ranks without one.
    """
    causes = [word.as_cause for word in words.values() if word.kind == _OTHER]
    silent = [rank for rank in others if rank not in words] if is_complete else []
    every = [own, *words.values()]
    closed = {word.peer for word in every if word.kind == _CLOSED} & {*silent}
    if not closed and all(word.kind == _CLOSED for word in every):
        closed = {*silent}
    elsewhere = [word for word in words.values() if word.kind != _OTHER and word.place != own.place]
    gave_up = [word.rank for word in words.values() if word.kind == _LATE and word.place == own.place]
    if causes:
        found = causes[:_SHOWN]
    elif closed:
        found = [f"{_ranks(closed)} not sent {own.part}: the connection is closed, as by a process that has ended"]
    elif silent:
        found = [f"{_ranks(silent)} not sent {own.part}, and said nothing: busy elsewhere, stopped, or cut off"]
    elif own.kind == _CLOSED and gave_up:
        found = [f"rank {own.rank} came too late to {own.place}: {_ranks(gave_up)} given up waiting"]
    elif elsewhere:
        found = [f"{_ranks(word.rank for word in elsewhere)} not sent {own.part}"]
    elif is_complete:
        found = [f"no rank has got all of {own.place}, though all of them wait there"]
    else:
        found = [f"{_ranks(others)} not sent {own.part}; the store of the job, where they may say why, does not answer"]
    return "; ".join([*found, *(f"rank {word.rank} is in {word.place}" for word in elsewhere[:_SHOWN])])


def reported(
    communicators: Communicators, place: tuple[str, Sequence[str], Level] | None, step: int | None, error: BaseException
) -> Report:
    """The report of a failure of a message.

    Args:
        communicators: the process groups of the message.
        place: name, units and level of the collective that has failed; ``None`` if the failure is in none.
        step: the training step.
    """
    ranks, own = communicators.ranks, communicators.rank
    what, keys, level = ("", (), Level.FLAT) if place is None else place
    members = next(found for found in communicators.topology.groups(level) if own in found)
    word = Word.of(ranks[own], what, keys, step, error)
    return Report(communicators.name, word, [ranks[each] for each in members])


def explained(group: dist.ProcessGroup, what: str, names: Sequence[str], step: int | None, error: Exception) -> str:
    """A sentence of what has happened in a failed collective of a group that belongs to no message, as
    :meth:`Report.text` gives it."""
    own = Word.of(dist.get_rank(), what, names, step, error)
    return Report(str(group.group_name), own, dist.get_process_group_ranks(group)).text()


def _own_store() -> Any:
    """The store of the job, over a connection that nobody else waits for if it has connections."""
    store: Any = distributed_c10d._get_default_store()
    inner = store
    while isinstance(inner, distributed_c10d.PrefixStore):
        inner = inner.underlying_store
    if type(inner).__name__ == "TCPStore":
        store = store.clone()
        store.set_timeout(timedelta(seconds=PATIENCE_S))
    return store


def _kind_of(text: str) -> str:
    if "imed out" in text or "timeout" in text:
        return _LATE
    return _CLOSED if any(words in text for words in CONSEQUENCES) else _OTHER


def _ranks(ranks: Iterable[int]) -> str:
    """Some ranks as the subject of a sentence, with its verb."""
    sorted_ranks = sorted(ranks)
    if len(sorted_ranks) == 1:
        return f"rank {sorted_ranks[0]} has"
    shown = ", ".join(map(str, sorted_ranks[: 2 * _SHOWN]))
    more = len(sorted_ranks) - 2 * _SHOWN
    return f"ranks {shown}{f' and {more} more' if more > 0 else ''} have"


def _cut(text: str, chars: int = _CHARS) -> str:
    return text if len(text) <= chars else f"{text[: chars - 3]}..."
