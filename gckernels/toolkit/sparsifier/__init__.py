"""Sparsifiers of whole units: the elements of largest magnitude are sent, as indices and values.

A compressor says how its entries are selected (``selection.py``) and what is accumulated from step to step
(``states.py``). Everything else is shared: error feedback, entries in the order of their indices, chunks, merging.

There is room for ``k = ceil(numel * ratio)`` entries in a payload. Everything that is not sent stays in the residual.

Payload: header (``toolkit/payload.py``), then the entries, ascending by index from the beginning of the chunk, in the
fields of ``toolkit/sparsifier/entries.py``: ``highs``, ``lows``, ``scales`` and ``values``.

Size in bytes: ``16 + field(4 * ceil((k + ceil(n / 2**low)) / 32)) + field(k * low / 8) +
field(4 * ceil(k / 64)) * (value_bits < 16) + field(k * value_bits / 8)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...codec import Backend, Codec, on_first_use
from ..fields import require_in, require_ratio
from ..payload import PayloadLayout, status_ok
from .entries import SPAN, VALUE_BITS, EntryFormat, low_bits
from .keys import RATIO_PARTS, capacity, keys_of, ratio_parts
from .selection import Selection
from .states import Accumulation

_PLAIN = Accumulation()


def _host() -> Backend:
    from .host import SparsifierHost

    return SparsifierHost()


def _triton() -> Backend:
    from .kernels import SparsifierTriton

    return SparsifierTriton()


class Sparsifier(Codec):
    """Base of the compressors that send the elements of largest magnitude (see the module's docstring).

    A subclass is a frozen dataclass with the fields ``ratio``, above 0 and at most 1, counted in units of ``1e-9``, and
    ``value_bits``, 32 (fp32), 16 (bf16), 8, 4 or 2. It sets ``selection`` to one of the four in ``selection.py``.
    Sparsifiers with other rules cannot be written outside this package: a rule takes C functions and Triton kernels.

    Attributes:
        parts: the ratio in units of ``1e-9``.
        entries: the format of entries in a payload.

    Raises:
        ValueError: ``ratio`` or ``value_bits`` is not as above.
        TypeError: ``selection`` is not one of the four.
    """

    if TYPE_CHECKING:  # the fields of subclasses, and what follows from them
        parts: int
        entries: EntryFormat

        @property
        def ratio(self) -> float: ...

        @property
        def value_bits(self) -> int: ...

        @property
        def selection(self) -> Selection: ...

    @property
    def accumulation(self) -> Accumulation:
        """How gradients are accumulated into the residual."""
        return _PLAIN

    def __post_init__(self) -> None:
        require_ratio(self.name, self.ratio)
        require_in(self.name, "value_bits", self.value_bits, VALUE_BITS)
        selection = getattr(self, "selection", None)
        if not isinstance(selection, Selection):
            raise TypeError(f"{self.name}: selection must be Exact, Leading, Sampled or Fixed, got {selection!r}")
        # every call needs these several times
        object.__setattr__(self, "parts", ratio_parts(self.ratio))
        object.__setattr__(self, "entries", EntryFormat(low_bits(self.parts, RATIO_PARTS), self.value_bits))

    def capacity(self, numel: int) -> int:
        """``k``: entries that there is room for in the payload of ``numel`` elements, at least one if there are any."""
        return capacity(numel, self.parts)

    def layout(self, numel: int) -> PayloadLayout:
        """Fields of the payload of ``numel`` elements: ``highs``, ``lows``, ``scales`` (not always), ``values``."""
        return self.entries.layout(numel, self.capacity(numel))

    def payload_nbytes(self, numel: int) -> int:
        return PayloadLayout.nbytes_of(*self.entries.fields(numel, self.capacity(numel)))

    # ---------------------------------------------------------------- reference

    def accumulate(self, grad: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.accumulation.accumulate(grad, residual)

    def keep(self, values: torch.Tensor, decoded: torch.Tensor) -> torch.Tensor:
        return self.accumulation.keep(values, decoded)

    def encode_reference(self, values: torch.Tensor, numel: int, seed: int, first: int) -> torch.Tensor:
        k = self.capacity(numel)
        keys = keys_of(values)
        lower, upper = self.selection.bounds(keys, k, seed, first)
        above = (keys > upper).nonzero()[:k, 0]
        between = ((keys > 0) & (keys >= lower) & (keys <= upper)).nonzero()[: k - above.numel(), 0]
        indices = torch.cat((above, between)).sort().values
        return self.entries.write(indices, values[indices], numel, k)

    def decode_reference(self, payload: torch.Tensor, numel: int) -> torch.Tensor:
        indices, values, wrong = self.entries.read(payload, numel, self.capacity(numel))
        spans = values.new_zeros(-(-numel // SPAN), SPAN)
        inside = ~wrong & (indices < numel)
        spans.view(-1)[indices[inside]] = values[inside]
        damaged = indices[wrong] // SPAN
        spans[damaged[damaged < len(spans)]] = torch.nan
        return torch.where(status_ok(payload), spans.flatten()[:numel], torch.nan)

    # ---------------------------------------------------------------- host path and kernels

    host = on_first_use(_host)
    triton = on_first_use(_triton)
