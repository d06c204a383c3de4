"""An entry that keeps a dict out of a checkpoint that would lose a part of it."""

from __future__ import annotations

import _codecs
from multiprocessing.reduction import ForkingPickler
from typing import Any


class Refusal(bytes):
    """A text that ``torch.distributed.checkpoint`` raises instead of saving it.

    That library keeps one of all values that ranks save under the same name, so of a state that is of one rank it would
    lose all others. It asks a value that knows what is to be written for it; this one raises :class:`ValueError`.
    Everywhere else it is bytes like any other: in a file of ``torch.save``, which loads with ``weights_only=True``, it
    is nothing else.
    """

    def __create_write_items__(self, name: str, value: object) -> list[Any]:
        raise ValueError(f"{name}: {self.decode()}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _codecs.encode, (self.decode("latin1"), "latin1")

    def __deepcopy__(self, memo: object) -> Refusal:
        return self


def _between_processes(refusal: Refusal) -> tuple[Any, ...]:
    return Refusal, (bytes(refusal),)


# a process that saves for this one must be refused, too
ForkingPickler.register(Refusal, _between_processes)


def refuse_to_be_deeper(self: object, name: str, value: object) -> list[Any]:
    """Raise :class:`ValueError`: that library asks for the state of an object only where that is a value of its dict,
    and would pickle one that is deeper."""
    raise ValueError(
        f"{name}: what checkpoint() returns must be a value of the dict that is given to torch.distributed.checkpoint, "
        "not deeper"
    )
