"""Identity: no compression, the baseline of every test and every benchmark.

Wire format: the values in fp32, times ``scale``, little endian, zero padded to a multiple of 16 bytes and at least 16.
There is no header, so that payloads can be added.
Size in bytes: ``max(16, field(4 * n))``.

Example: ``Identity()``, ``p = [1, -2.5]``, scale 1::

    bytes 0..15  00 00 80 3F 00 00 20 C0 00 .. 00
    decoded [1, -2.5], residual [0, 0]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..compressor import Traits
from ..registration import register
from ..toolkit.cast import CastCompressor


@register
@dataclass(frozen=True)
class Identity(CastCompressor):
    """Unchanged fp32 values (see the module's docstring)."""

    traits = Traits(summable=True, payload_dtype=torch.float32)
