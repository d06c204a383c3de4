"""The host's codecs on the simulated device, so that results have the same bits as on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from gckernels.codec import Backend, Codec, Decoding, Encoding, Recoding, Work
from gckernels.devices import is_accelerator
from gckernels.ops.powersgd import host as powersgd_host
from gckernels.ops.powersgd import ops as powersgd_ops

from .module import compiled, on_host, tensors_in

_OUTPUTS = ("residual", "payload", "out")
_FACTORS = {"orthogonalise": [0], "left": [3], "right": [3], "reconstruct": [2, 3], "keep": [0, 1]}
"""The arguments that each step of PowerSGD changes."""


def install() -> None:
    """Let all codecs, also those that are registered later, use their host's back ends on the simulated device."""
    choose = Codec.backend.__func__  # type: ignore[attr-defined]

    def backend(cls: type[Codec], device: torch.device) -> Backend:
        return OnStreams(cls.host) if is_accelerator(device) else choose(cls, device)

    Codec.backend = classmethod(backend)  # type: ignore[assignment, method-assign]
    choose_steps, steps = powersgd_ops.back_end, _PowerSGD()

    def back_end(tensors: Sequence[torch.Tensor]) -> Any:
        return steps if is_accelerator(tensors[0].device) else choose_steps(tensors)

    powersgd_ops.back_end = back_end


def _launch(what: str, tensors: Iterable[torch.Tensor | None], outputs: Iterable[torch.Tensor], work: Work) -> None:
    reads = [each for each in tensors if each is not None]
    compiled.launch(compiled.here(), reads, list(outputs), what, work)


class OnStreams(Backend):
    """A back end of the host whose work is put onto the current stream.

    Args:
        host: the back end.
    """

    def __init__(self, host: Backend) -> None:
        self._host = host

    def encode(self, unit: Encoding, scale: float = 1.0) -> None:
        self._put("encode", [unit], lambda units: lambda: self._host.encode(units[0], scale))

    def decode(self, unit: Decoding, scale: float = 1.0, accumulate: bool = False) -> None:
        self._put("decode", [unit], lambda units: lambda: self._host.decode(units[0], scale, accumulate))

    def recode(self, unit: Recoding, scale: float = 1.0) -> None:
        self._put("recode", [unit], lambda units: lambda: self._host.recode(units[0], scale))

    def bind_encodes(self, units: Sequence[Encoding], scale: float = 1.0, added: torch.Tensor | None = None) -> Work:
        return self._bind("encode", units, lambda units, added: self._host.bind_encodes(units, scale, added), added)

    def bind_decodes(self, units: Sequence[Decoding], scale: float = 1.0, accumulate: bool = False) -> Work:
        return self._bind("decode", units, lambda units, _: self._host.bind_decodes(units, scale, accumulate))

    def bind_recodes(self, units: Sequence[Recoding], scale: float = 1.0, added: torch.Tensor | None = None) -> Work:
        return self._bind("recode", units, lambda units, added: self._host.bind_recodes(units, scale, added), added)

    def _put(self, what: str, units: Sequence[Any], bind: Callable[[list[Any]], Work]) -> None:
        self._bind(what, units, lambda units, _: bind(units))()

    def _bind(
        self, what: str, units: Sequence[Any], bind: Callable[..., Work], added: torch.Tensor | None = None
    ) -> Work:
        work = bind([_on_host(unit) for unit in units], on_host(added))
        reads = [added, *(tensor for unit in units for _, tensor in _tensors(unit))]
        writes = [tensor for unit in units for name, tensor in _tensors(unit) if name in _OUTPUTS]
        return lambda: _launch(what, reads, writes, work)


def _tensors(unit: Any) -> list[tuple[str, torch.Tensor]]:
    fields = [(field.name, getattr(unit, field.name)) for field in dataclasses.fields(unit)]
    return [(name, value) for name, value in fields if isinstance(value, torch.Tensor)]


def _on_host(unit: Any) -> Any:
    return dataclasses.replace(unit, **{name: compiled.on_host(tensor) for name, tensor in _tensors(unit)})


class _PowerSGD:
    """The host's steps of PowerSGD, put onto the current stream."""

    def __getattr__(self, bind: str) -> Callable[..., Work]:
        what = bind.removeprefix("bind_")

        def bound(*given: Any) -> Work:
            work = getattr(powersgd_host, bind)(*on_host(given))
            reads, writes = tensors_in(given), tensors_in([given[index] for index in _FACTORS[what]])
            return lambda: _launch(f"PowerSGD's {what}", reads, writes, work)

        return bound
