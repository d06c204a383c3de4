"""Values that make ``torch.distributed.checkpoint`` refuse to save a state of which it would lose a part."""

from __future__ import annotations

import _codecs
from multiprocessing.reduction import ForkingPickler
from typing import Any


class Refusal(bytes):
    """A text that ``torch.distributed.checkpoint`` raises as an error instead of saving it.

    The library keeps one of the values that ranks save under the same name, so it would lose the states of all ranks
    but one. It calls the method ``__create_write_items__`` of values that have one, which raises
    :class:`ValueError` here. Elsewhere the object is plain bytes, also in a file written by ``torch.save``, which loads
    with ``weights_only=True``.
    """

    def __create_write_items__(self, name: str, value: object) -> list[Any]:
        raise ValueError(f"{name}: {self.decode()}")

    def __reduce__(self) -> tuple[Any, ...]:
        return _codecs.encode, (self.decode("latin1"), "latin1")

    def __deepcopy__(self, memo: object) -> Refusal:
        return self


def _between_processes(refusal: Refusal) -> tuple[Any, ...]:
    return Refusal, (bytes(refusal),)


# must also refuse in another process that saves for this one
ForkingPickler.register(Refusal, _between_processes)


def refuse_to_be_deeper(self: object, name: str, value: object) -> list[Any]:
    """Raise :class:`ValueError`; the ``__create_write_items__`` of objects with a ``state_dict``.

    ``torch.distributed.checkpoint`` calls ``state_dict`` only on the values of its dict, and would pickle an object
    that is nested deeper.
    """
    raise ValueError(
        f"{name}: what checkpoint() returns must be a value of the dict that is given to torch.distributed.checkpoint, "
        "not nested deeper"
    )
