"""What is remembered of a unit from step to step: fp32, keyed by its name.

Residuals of error feedback, one for every encoding of its program: ``worker``, what this rank's first encoding did not
say, ``shard``, what the second one did not, of the averaged shard that this rank owns, and two more for programs with
as many encodings. And the factors ``q`` and ``p`` with which a low-rank method begins its next steps, the same on all
ranks. Keys are names, not bucket positions, so all of it survives rebuilt buckets, checkpoints and resumed processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ..programs.steps import Place
from .places import Places

ENCODINGS = ("worker", "shard", "shard2", "shard3")
"""What the residuals of a program's encodings are called, in order. No program encodes more often."""
KINDS = (*ENCODINGS, "p", "q")
NOUNS = {kind: f"{kind} residual" for kind in ENCODINGS} | {"p": "factor P", "q": "factor Q"}


class Feedback:
    """The residuals and factors of one rank.

    Args:
        places: where they are kept: a residual is where its encoding is.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._residuals: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in KINDS}

    def residual(self, kind: str, parameter: str, numel: int, place: Place = Place.DEVICE) -> torch.Tensor:
        """The residual (all states of a compressor) or factor of a parameter, ``fp32 [numel]``; zeros when there was
        none. The tensor stays the same one, as long as it is at the same place.

        Raises:
            ValueError: there is one, of another size (a shard of a job with another world size).
        """
        known, device = self._residuals[kind], self._places.memory(place)
        if parameter not in known:
            known[parameter] = torch.zeros(numel, dtype=torch.float32, device=device)
        known[parameter] = known[parameter].to(device)  # one that was loaded may belong elsewhere
        if known[parameter].numel() != numel:
            raise ValueError(
                f"feedback: the {NOUNS[kind]} of {parameter} has {known[parameter].numel()} elements, need {numel}"
            )
        return known[parameter]

    def items(self) -> Iterator[tuple[str, str, torch.Tensor]]:
        """Kind, parameter and tensor of each residual and factor that there is."""
        for kind in KINDS:
            for name, tensor in self._residuals[kind].items():
                yield kind, name, tensor

    def nbytes(self) -> int:
        """Bytes that residuals and factors take on this rank."""
        return sum(tensor.nbytes for *_, tensor in self.items())

    def state_dict(self, device: torch.device | None = None) -> dict[str, dict[str, torch.Tensor]]:
        """``{"worker": {parameter: residual}, "shard": {...}, "p": {parameter: factor}, "q": {...}}``, copies; by
        default where they are."""
        return {
            kind: {
                name: tensor.to(device or tensor.device, copy=True) for name, tensor in self._residuals[kind].items()
            }
            for kind in KINDS
        }

    def load_state_dict(
        self, state: dict[str, dict[str, torch.Tensor]], sizes: dict[str, dict[str, int]] | None = None
    ) -> None:
        """Take over residuals; tensors handed out before keep their identity, those without a saved one become zero.

        Args:
            state: what :meth:`state_dict` returned.
            sizes: elements of every residual that there can be, of the same form; by default any.

        Raises:
            ValueError: a kind is missing or not known, or a residual has another dtype or size, or holds inf or NaN.
                Nothing has been changed.
        """
        check_state(state, sizes)
        for kind in KINDS:
            for name, tensor in state[kind].items():
                if name in self._residuals[kind]:
                    _check_size(kind, name, tensor, self._residuals[kind][name].numel())
        for kind in KINDS:
            known, saved = self._residuals[kind], state[kind]
            for name in known.keys() - saved.keys():
                known[name].zero_()
            for name, tensor in saved.items():
                if name in known:
                    known[name].copy_(tensor)
                else:
                    known[name] = tensor.detach().to(self._places.device, torch.float32, copy=True)


def check_state(state: Any, sizes: dict[str, dict[str, int]] | None = None) -> None:
    """Raise :class:`ValueError` unless ``state`` is of the form of :meth:`Feedback.state_dict`.

    Args:
        state: anything.
        sizes: elements of every residual that there can be, of the same form; by default any.
    """
    unknown = [kind for kind in state if kind not in KINDS] if isinstance(state, dict) else []
    if unknown:
        raise ValueError(f"feedback: there are no residuals of the kind {unknown[0]!r}")
    for kind in KINDS:
        saved = state.get(kind) if isinstance(state, dict) else None
        if not isinstance(saved, dict):
            raise ValueError(f"feedback: the state must have an entry {kind!r}")
        for name, tensor in saved.items():
            if not _is_vector(tensor):
                raise ValueError(
                    f"feedback: the {NOUNS[kind]} of {name} must be a float32 vector, got {_shown(tensor)}"
                )
            if sizes is not None and name not in sizes[kind]:
                raise ValueError(f"feedback: the {NOUNS[kind]} of {name} is not of this plan")
            if sizes is not None:
                _check_size(kind, name, tensor, sizes[kind][name])
            require_finite("feedback", kind, name, tensor)


def require_finite(what: str, kind: str, name: str, tensor: torch.Tensor) -> None:
    """Raise :class:`ValueError` if a residual or factor holds inf or NaN, which it would keep for ever.

    Args:
        what: the error begins with it.
        kind: of the residual or factor.
        name: of its unit.
        tensor: itself.
    """
    if not tensor.isfinite().all():
        raise ValueError(f"{what}: the {NOUNS[kind]} of {name} holds inf or NaN")


def _check_size(kind: str, name: str, tensor: torch.Tensor, numel: int) -> None:
    if tensor.numel() != numel:
        raise ValueError(f"feedback: the {NOUNS[kind]} of {name} has {tensor.numel()} elements, need {numel}")


def _is_vector(tensor: Any) -> bool:
    """Whether this is a plain float32 vector with memory, of any stride."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    return plain and not tensor.is_meta and tensor.dtype == torch.float32 and tensor.dim() == 1


def _shown(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{type(value).__name__} of {value.dtype} {tuple(value.shape)} on {value.device}"
