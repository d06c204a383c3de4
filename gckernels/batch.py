"""Binding of many units: functions that encode, decode or recode the same tensors in every step.

A synchronisation has hundreds of units, most of them small, and one call per unit costs more than its work. A caller
that uses the same tensors in every step can bind them: arguments are checked once, units that can share a launch or a
call are grouped, and the resulting function is called in every step. Results equal, bit for bit, those of one call of
:meth:`Codec.encode`, :meth:`~Codec.decode` or :meth:`~Codec.recode` for each unit.

The tensors must keep their places in memory, and no unit may write to what another one reads or writes. Tensors without
memory (of the device ``meta``) are bound, too; then there is nothing to call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from .arguments import check_added, check_decode, check_encode, check_recode
from .codec import Backend, Codec, Decoding, Encoding, Recoding, Work


def bind_encodes(units: Iterable[Encoding], scale: float = 1.0, added: torch.Tensor | None = None) -> Bound:
    """A function that encodes all units.

    Args:
        units: the units.
        scale: as for :meth:`Codec.encode`.
        added: int64, one number on the device of the units; by default 0. At every call it is read there and added to
            all seeds, modulo 2**63. So a call launches the same work in every step, which a CUDA graph can repeat with
            other random numbers.

    Raises:
        TypeError, ValueError: as :meth:`Codec.encode`, for any of the units; ``added`` is of another kind.
    """
    checked = []
    for unit in units:
        payload, size = check_encode(unit.compressor, unit.grad, unit.residual, unit.payload, scale, unit.size)
        check_added(added, unit.grad.device)
        checked.append(replace(unit, payload=payload, size=size))

    def bind(backend: Backend, group: list[Encoding]) -> Work:
        return backend.bind_encodes(group, scale, _read_by(group[0].compressor, added))

    return _bound(checked, lambda unit: unit.grad, bind)


def bind_decodes(units: Iterable[Decoding], scale: float = 1.0, accumulate: bool = False) -> Bound:
    """A function that decodes and merges the payloads of all units.

    Raises:
        TypeError, ValueError: as :meth:`Codec.decode`, for any of the units.
    """
    checked = []
    for unit in units:
        payloads, size = check_decode(unit.compressor, unit.payloads, unit.out, unit.size)
        checked.append(replace(unit, payloads=payloads, size=size))
    return _bound(checked, lambda unit: unit.out, lambda backend, group: backend.bind_decodes(group, scale, accumulate))


def bind_recodes(units: Iterable[Recoding], scale: float = 1.0, added: torch.Tensor | None = None) -> Bound:
    """A function that recodes all units; ``added`` is as for :func:`bind_encodes`.

    Raises:
        TypeError, ValueError: as :meth:`Codec.recode`, for any of the units.
    """
    checked = []
    for unit in units:
        size = check_recode(unit.compressor, unit.payloads, unit.residual, unit.payload, unit.numel, unit.size)
        check_added(added, unit.payload.device)
        checked.append(replace(unit, size=size))

    def bind(backend: Backend, group: list[Recoding]) -> Work:
        return backend.bind_recodes(group, scale, _read_by(group[0].compressor.shard_compressor, added))

    return _bound(checked, lambda unit: unit.payload, bind)


def _read_by(encoder: Codec, added: torch.Tensor | None) -> torch.Tensor | None:
    """``added`` if payloads of ``encoder`` depend on seeds."""
    return added if encoder.traits.stochastic else None


T = TypeVar("T")


def grouped(units: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Units grouped by key, in order of first appearance."""
    groups: dict[Hashable, list[T]] = {}
    for unit in units:
        groups.setdefault(key(unit), []).append(unit)
    return list(groups.values())


class Bound:
    """Several bound functions run as one; keeps their units, and so the tensors, alive."""

    def __init__(self, works: Sequence[Work], units: Sequence[Any] = ()) -> None:
        self._works, self._units = tuple(works), tuple(units)

    def __call__(self) -> None:
        for work in self._works:
            work()


def _bound(units: list[Any], tensor: Callable[[Any], torch.Tensor], bind: Any) -> Bound:
    works = []
    for group in grouped(units, lambda unit: (unit.compressor, tensor(unit).device)):
        device = tensor(group[0]).device
        if device.type != "meta":
            works.append(bind(group[0].compressor.backend(device), group))
    return Bound(works, units)
