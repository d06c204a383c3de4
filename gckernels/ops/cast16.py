"""Cast16: every value rounded to a 16-bit floating-point type.

Mixed-precision training reduces its gradients in this way. The values are multiplied by ``scale`` before the cast; with
``1 / world_size`` a sum of fp16 payloads stays in range. Error feedback is optional and keeps the rounding errors.

Wire format: the values in ``dtype`` (rounded to nearest, ties to even), little endian, zero padded to a multiple of 16
bytes and at least 16. There is no header, so that payloads can be added.
Size in bytes: ``max(16, field(2 * n))``.

Example: ``Cast16()``, ``p = [1, -2.5, 1.001953125]``, bf16, scale 1::

    bytes 0..15  80 3F 20 C0 80 3F 00 .. 00
    decoded [1, -2.5, 1], residual [0, 0, 0.001953125]

Example: ``Cast16(dtype='float16')``, ``p = [1, -2.5, 1.00048828125]``; the last value is halfway between 1 and
``1 + 2**-10`` and becomes the even one::

    bytes 0..15  00 3C 00 C1 00 3C 00 .. 00
    decoded [1, -2.5, 1]
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from ..compressor import Traits
from ..registration import register
from ..toolkit.cast import CastCompressor
from ..toolkit.fields import as_dtype, require_in


@register
@dataclass(frozen=True)
class Cast16(CastCompressor):
    """16 bits per element (see the module's docstring).

    Attributes:
        dtype: ``torch.bfloat16`` or ``torch.float16``, or a name of one: ``"bf16"``, ``"float16"``.

    Raises:
        ValueError: for any other ``dtype``.
    """

    dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", as_dtype("Cast16: dtype", self.dtype))
        require_in("Cast16", "dtype", self.dtype, (torch.bfloat16, torch.float16))

    @functools.cached_property
    def traits(self) -> Traits:
        return Traits(summable=True, payload_dtype=self.dtype)
