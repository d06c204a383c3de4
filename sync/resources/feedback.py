"""Residuals and factors: the state that units carry from step to step.

Error feedback keeps one residual for every encoding of a program. ``worker`` is the error of the first encoding, that
of this rank's gradient. ``shard`` is the error of the second encoding, that of the averaged shard which this rank owns.
``shard2`` and ``shard3`` are for programs with as many encodings. A low-rank method keeps the factors ``q`` and ``p``
with which its next steps begin; they are the same on all ranks. Keys are the names of units, not positions in buckets,
so all of it survives rebuilt buckets, checkpoints and resumed processes. In checkpoints all of it is fp32.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..programs.residuals import ENCODINGS
from ..programs.steps import Place
from .error_probe import ProbeSchedule
from .memory_spaces import Places
from .residual import EncodedForm, Residual
from .unused import Unused

KINDS = (*ENCODINGS, "p", "q")
"""The kinds of residuals and factors."""
NOUNS = {kind: f"{kind} residual" for kind in ENCODINGS} | {"p": "factor P", "q": "factor Q"}
"""How messages name each kind."""


class Feedback:
    """The residuals and factors of one rank.

    Args:
        places: the memories of the rank. A residual lies where its unit is encoded.
        bits: 8 to keep residuals in 8 bits where an encoding can, otherwise 32.

    Attributes:
        watch: takes the norms of what is encoded, in some steps.
        unused: the units that this rank has not used in the current step.
    """

    def __init__(self, places: Places, bits: int = 32) -> None:
        self._places, self._bits, self.watch, self.unused = places, bits, ProbeSchedule(), Unused()
        self._residuals: dict[str, dict[str, Residual]] = {kind: {} for kind in KINDS}

    def residual(
        self, kind: str, key: str, numel: int, place: Place = Place.DEVICE, form: EncodedForm | None = None
    ) -> Residual:
        """The residual or factor of a unit, made of zeros at the first call.

        Later calls return the same one, with the same tensor as long as ``place`` and ``form`` stay the same.

        Args:
            kind: one of :data:`KINDS`.
            key: name of the unit.
            numel: its number of elements, for a residual all states of the compressor together.
            place: where the tensor is needed.
            form: the form in 8 bits that the encoding can take; ``None`` if it can take none.

        Raises:
            ValueError: it exists with another size (as a shard in a job with another number of ranks has).
        """
        known, device = self._residuals[kind], self._places.memory(place)
        form = form if self._bits == 8 else None
        if key not in known:
            known[key] = Residual.zeros(numel, device, form)
        _check_size(kind, key, known[key].numel, numel)
        known[key].change(device, form)  # a loaded one is fp32, and may be at the other place
        return known[key]

    def get(self, kind: str, key: str) -> torch.Tensor | None:
        """The values of a residual or factor, ``fp32 [numel]``; ``None`` if it does not exist yet."""
        found = self.find(kind, key)
        return None if found is None else found.values()

    def find(self, kind: str, key: str) -> Residual | None:
        """The residual or factor of a unit; ``None`` if it does not exist yet."""
        self.unused.settle()
        return self._residuals[kind].get(key)

    def drop(self, kind: str, key: str) -> None:
        """Free the residual or factor of a unit."""
        del self._residuals[kind][key]

    def items(self) -> Iterator[tuple[str, str, Residual]]:
        """Kind and unit name of each residual and factor that exists, and itself."""
        self.unused.settle()
        for kind in KINDS:
            for name, residual in self._residuals[kind].items():
                yield kind, name, residual

    def nbytes(self) -> int:
        """Bytes of all residuals and factors of this rank."""
        return sum(residual.tensor.nbytes for *_, residual in self.items())

    def state_dict(self, device: torch.device | None = None) -> dict[str, dict[str, torch.Tensor]]:
        """Copies of all values, by kind and unit: ``{"worker": {unit: fp32 [numel]}, "shard": {...}, ...}``.

        Args:
            device: device of the copies; by default that of each tensor.
        """
        found: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in KINDS}
        for kind, name, residual in self.items():
            values = residual.values()
            copied = values is residual.tensor
            found[kind][name] = values.to(device or values.device, copy=copied)
        return found

    def load_state_dict(
        self, state: dict[str, dict[str, torch.Tensor]], sizes: dict[str, dict[str, int]] | None = None
    ) -> None:
        """Replace all residuals and factors by saved ones; those that were not saved become zero.

        Tensors that :meth:`residual` has returned stay the same objects.

        Args:
            state: what :meth:`state_dict` returned.
            sizes: the allowed units of every kind, with their numbers of elements; by default any.

        Raises:
            ValueError: a kind is missing or unknown, or a tensor has another dtype or size, or holds inf or NaN.
                Nothing has been changed.
        """
        check_state(state, sizes)
        self.unused.settle()
        for kind in KINDS:
            for name, tensor in state[kind].items():
                if name in self._residuals[kind]:
                    _check_size(kind, name, tensor.numel(), self._residuals[kind][name].numel)
        for kind in KINDS:
            known, saved = self._residuals[kind], state[kind]
            for name in known.keys() - saved.keys():
                known[name].zero()
            for name, tensor in saved.items():
                values = tensor.detach().to(self._places.device, torch.float32, copy=True)
                if name in known:
                    known[name].write(values)
                else:
                    known[name] = Residual(values, values.numel())


def check_state(state: Any, sizes: dict[str, dict[str, int]] | None = None) -> None:
    """Raise :class:`ValueError` unless ``state`` has the form of :meth:`Feedback.state_dict`.

    Args:
        state: any object.
        sizes: the allowed units of every kind, with their numbers of elements; by default any.
    """
    unknown = [kind for kind in state if kind not in KINDS] if isinstance(state, dict) else []
    if unknown:
        raise ValueError(f"feedback: unknown kind {unknown[0]!r}; known: {', '.join(KINDS)}")
    for kind in KINDS:
        saved = state.get(kind) if isinstance(state, dict) else None
        if not isinstance(saved, dict):
            raise ValueError(f"feedback: the state must have a dict under {kind!r}")
        for name, tensor in saved.items():
            if not _is_vector(tensor):
                raise ValueError(
                    f"feedback: the {NOUNS[kind]} of {name} must be a float32 vector, got {_describe(tensor)}"
                )
            if sizes is not None and name not in sizes[kind]:
                raise ValueError(f"feedback: the plan keeps no {NOUNS[kind]} of {name}, but the state has one")
            if sizes is not None:
                _check_size(kind, name, tensor.numel(), sizes[kind][name])
            require_finite("feedback", kind, name, tensor)


def require_finite(caller: str, kind: str, name: str, tensor: torch.Tensor) -> None:
    """Raise :class:`ValueError` if a residual or factor holds inf or NaN, which it would keep forever.

    Args:
        caller: prefix of the error message.
        kind: one of :data:`KINDS`.
        name: name of the unit.
        tensor: the residual or factor.
    """
    if not tensor.isfinite().all():
        raise ValueError(f"{caller}: the {NOUNS[kind]} of {name} holds inf or NaN")


def _check_size(kind: str, name: str, given: int, numel: int) -> None:
    if given != numel:
        raise ValueError(f"feedback: the {NOUNS[kind]} of {name} has {given} elements, need {numel}")


def _is_vector(tensor: Any) -> bool:
    """Whether ``tensor`` is a plain float32 vector with memory, of any stride."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return plain and not tensor.is_meta and tensor.dtype == torch.float32 and tensor.dim() == 1


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{type(value).__name__} of {value.dtype} {tuple(value.shape)} on {value.device}"
