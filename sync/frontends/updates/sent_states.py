"""States of optimizers that one rank sends to others, as JSON and tensors. Nothing is unpickled."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ...communication.agreement import named

_COPIES_LIMIT = 16
_SMALL_NBYTES = 2**26


def written(what: str, state: Any) -> tuple[str, list[torch.Tensor]]:
    """A state as text, and the tensors to which this refers, in order.

    Args:
        what: what it is the state of, for errors.
        state: dicts with keys of text and numbers, lists and tuples, in each other in any depth, of tensors, texts,
            numbers, truth values and ``None``.

    Raises:
        TypeError: it has anything else.
    """
    tensors: list[torch.Tensor] = []

    def entry(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value.detach())
            return {"tensor": [str(value.dtype).removeprefix("torch."), *value.shape]}
        if isinstance(value, dict):
            return {"dict": [[entry(key), entry(each)] for key, each in value.items()]}
        if isinstance(value, list | tuple):
            return {"list" if isinstance(value, list) else "tuple": [entry(each) for each in value]}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        raise TypeError(f"{what}: a state must have tensors, texts and numbers to be sent, got {type(value).__name__}")

    return json.dumps(entry(state)), tensors


def read(what: str, text: str, nbytes: int) -> tuple[Any, list[torch.Tensor]]:
    """The state of a text that :func:`written` has returned, and the tensors in it, in order, without their values.

    Args:
        what: what it is the state of, for errors.
        text: the text, of another rank.
        nbytes: the bytes of what it is the state of, for how much a state may have.

    Raises:
        ValueError: the text is none of a state, or its tensors have too many bytes.
    """
    tensors, left = list[torch.Tensor](), [_COPIES_LIMIT * nbytes + _SMALL_NBYTES]

    def value(entry: Any) -> Any:
        match entry:
            case None | bool() | int() | float() | str():
                return entry
            case {"tensor": [str(name), *shape]} if len(entry) == 1:
                return tensor(name, shape)
            case {"dict": list(pairs)} if len(entry) == 1:
                return {value(key): value(each) for key, each in pairs}
            case {"list": list(each)} if len(entry) == 1:
                return [value(one) for one in each]
            case {"tuple": list(each)} if len(entry) == 1:
                return tuple(value(one) for one in each)
        raise ValueError(f"{entry!r:.60} is no part of a state")

    def tensor(name: str, shape: list[Any]) -> torch.Tensor:
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype) or not all(type(each) is int and each >= 0 for each in shape):
            raise ValueError(f"{name!r:.40} {shape!r:.60} is no tensor")
        left[0] -= math.prod(shape) * dtype.itemsize
        if left[0] < 0:
            raise ValueError(f"a tensor {shape!r:.60} has too many bytes beside {nbytes:,} of the parameters")
        tensors.append(torch.empty(shape, dtype=dtype, device="cpu"))
        return tensors[-1]

    try:
        return value(json.loads(text)), tensors
    except (ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{what}: {error}") from error


def broadcast_tensors(
    group: dist.ProcessGroup,
    device: torch.device,
    source: int,
    own: Sequence[torch.Tensor],
    into: Sequence[torch.Tensor],
    what: str,
    names: Sequence[str] = (),
) -> None:
    """Give the tensors of a rank of a group to all others. Collective.

    Args:
        group: the ranks.
        device: a device whose tensors the group can send.
        source: the rank.
        own: the tensors of this rank, used on ``source`` alone.
        into: tensors with the same shapes and dtypes, into which they are written.
        what: the collective, for errors.
        names: the names of the tensors, for errors, if they have any.
    """
    for number, each in enumerate(into):
        sent = (own[number] if dist.get_rank(group) == source else each).to(device).contiguous()
        if sent.numel():
            with named(group, what, names[number : number + 1]):
                dist.broadcast(sent, group_src=source, group=group)
        each.copy_(sent)


@dataclass(frozen=True)
class SentState:
    """A state that a rank sends, as all ranks have read it.

    Attributes:
        state: the state, with tensors without their values.
        tensors: these tensors, in order.
        own: the tensors of this rank's own state, which are sent if it is the source.
    """

    state: Any
    tensors: Sequence[torch.Tensor]
    own: Sequence[torch.Tensor]

    def received(self, group: dist.ProcessGroup, device: torch.device, source: int) -> Any:
        """The state, with the values of a rank. Collective; the arguments are those of :func:`broadcast_tensors`."""
        broadcast_tensors(group, device, source, self.own, self.tensors, "regroup: the state of the outer optimizer")
        return self.state
