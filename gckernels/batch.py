"""Many units at once: what is done in every step with the same tensors, bound to them once.

A synchronisation has hundreds of units, most of them small, and a call for each costs more than its work. So whoever
encodes the same tensors in every step binds them: arguments are checked once, the units that a compressor can treat
together are put together, and what comes back is called in every step. Results are bit for bit those of one call of
:meth:`Compressor.encode`, :meth:`~Compressor.decode` or :meth:`~Compressor.recode` for each unit.

The tensors must keep their places in memory, and no unit may write to what another one reads or writes. Tensors without
memory (of the device ``meta``) are bound, too; then there is nothing to call.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from .arguments import check_decode, check_encode, check_recode
from .compressor import Decoding, Encoding, Recoding

SEED_MASK = 2**63 - 1


Seeded = Callable[[int], None]
"""Takes what is added to the seed of every unit: what is used is the sum modulo 2**63."""
Unseeded = Callable[[], None]


def bind_encodes(units: Iterable[Encoding], scale: float = 1.0) -> Seeded:
    """Bind the encoding of all units.

    Raises:
        TypeError, ValueError: as :meth:`Compressor.encode`, for any of the units.
    """
    checked = []
    for unit in units:
        payload, size = check_encode(unit.compressor, unit.grad, unit.residual, unit.payload, scale, unit.size)
        checked.append(replace(unit, payload=payload, size=size))
    return _bound(checked, lambda unit: unit.grad, lambda batch, group: batch.bind_encodes(group, scale))


def bind_decodes(units: Iterable[Decoding], scale: float = 1.0, accumulate: bool = False) -> Unseeded:
    """Bind the decoding and merging of all units.

    Raises:
        TypeError, ValueError: as :meth:`Compressor.decode`, for any of the units.
    """
    checked = []
    for unit in units:
        payloads, size = check_decode(unit.compressor, unit.payloads, unit.out, unit.size)
        checked.append(replace(unit, payloads=payloads, size=size))
    return _bound(checked, lambda unit: unit.out, lambda batch, group: batch.bind_decodes(group, scale, accumulate))


def bind_recodes(units: Iterable[Recoding], scale: float = 1.0) -> Seeded:
    """Bind the decoding, merging and encoding again of all units.

    Raises:
        TypeError, ValueError: as :meth:`Compressor.recode`, for any of the units.
    """
    checked = []
    for unit in units:
        size = check_recode(unit.compressor, unit.payloads, unit.residual, unit.payload, unit.numel, unit.size)
        checked.append(replace(unit, size=size))
    return _bound(checked, lambda unit: unit.payload, lambda batch, group: batch.bind_recodes(group, scale))


class Batch:
    """Binds units of one compressor, whose arguments are checked.

    Here, one call for each unit. A compressor that can do better returns a subclass from :meth:`Compressor.batch`.

    Args:
        compressor: of all units.
        place: ``"host"`` or ``"triton"``: which implementations are called.
    """

    def __init__(self, compressor: Any, place: str) -> None:
        self.compressor, self.place = compressor, place

    def bind_encodes(self, units: Sequence[Encoding], scale: float) -> Seeded:
        encode = getattr(self.compressor, f"encode_{self.place}")

        def work(added: int) -> None:
            for unit in units:
                seed = (unit.seed + added) & SEED_MASK
                encode(unit.grad, unit.residual, unit.payload, unit.size, seed, scale)

        return work

    def bind_decodes(self, units: Sequence[Decoding], scale: float, accumulate: bool) -> Unseeded:
        decode = getattr(self.compressor, f"decode_{self.place}")

        def work() -> None:
            for unit in units:
                decode(unit.payloads, unit.out, unit.size, scale, accumulate)

        return work

    def bind_recodes(self, units: Sequence[Recoding], scale: float) -> Seeded:
        recode = getattr(self.compressor, f"recode_{self.place}")

        def work(added: int) -> None:
            for unit in units:
                seed = (unit.seed + added) & SEED_MASK
                recode(unit.payloads, unit.residual, unit.payload, unit.numel, unit.size, scale, seed)

        return work


T = TypeVar("T")


def grouped(units: Iterable[T], key: Callable[[T], Hashable]) -> list[list[T]]:
    """Those of the same key together, in order."""
    groups: dict[Hashable, list[T]] = {}
    for unit in units:
        groups.setdefault(key(unit), []).append(unit)
    return list(groups.values())


class Bound:
    """Works as one, and what they work on, which is kept."""

    def __init__(self, works: Sequence[Callable[..., None]], units: Sequence[Any] = ()) -> None:
        self._works, self._units = tuple(works), tuple(units)

    def __call__(self, *added: int) -> None:
        for work in self._works:
            work(*added)


def _bound(units: list[Any], tensor: Callable[[Any], torch.Tensor], bind: Any) -> Bound:
    works = []
    for group in grouped(units, lambda unit: (unit.compressor, tensor(unit).device)):
        device = tensor(group[0]).device.type
        if device != "meta":
            batch = group[0].compressor.batch("host" if device == "cpu" else "triton")
            works.append(bind(batch, group))
    return Bound(works, units)
