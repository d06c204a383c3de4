"""DGC, deep gradient compression: sparse gradients with a momentum that is corrected for delayed entries.

Lin et al., "Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training", ICLR
2018 (arXiv:1712.01887): Algorithm 1 and sections 3.1 to 3.3. ``docs/howto/dgc.md`` explains how to train with it.

**Momentum correction** (3.2). Every rank keeps a velocity ``u`` of its own gradient, and accumulates the unsent part of
the velocity in ``v``: ``u = m u + g``, ``v = v + u``; with Nesterov's momentum ``u = m (u + g)``, ``v = v + u + g``, as
in the authors' program. The optimizer must then have no momentum. **Momentum factor masking** (3.2): sent entries are
subtracted from ``v``, and ``u`` becomes 0 there. The ``residual`` argument is ``u`` followed by ``v``,
``[2 * numel]``, or only ``v`` with ``momentum=0.0``. Without the argument the gradient itself is sparsified.

**Selection** (3.1). Entries of ``v`` are sent if they reach a bound: the magnitude of rank ``k * sample / numel``,
rounded up, in a sample drawn as in ``GradDrop`` (all entries up to 2047 elements, about 1 % from 102,400 on). If more
than ``k`` entries reach it, the bound is trimmed to the k-th largest magnitude of all; of equal magnitudes the lower
index goes first. So at most k entries are sent, and they are larger than all others. Inf and NaN take precedence, and
leave ``u`` and ``v`` unchanged. Zeros are not sent.

**Local gradient clipping** (3.3). The gradient is scaled before accumulation so that its norm is at most ``clip /
sqrt(workers)``; then the norm of the sum of that many independent gradients is at most about ``clip``. The paper
divides gradients by the number of workers first, so that their sum is their mean. Here the mean is computed at the end,
so limiting it to ``c`` needs ``clip = c * workers``. The norm is that of the unit, one parameter.
``toolkit/sparsifier/states.py`` states its accuracy.

**Warm-up** (3.3). In the first ``warmup_steps`` compressed steps the ratio falls: 0.25, 0.0625, 0.015625, 0.004, for a
quarter of the steps each, but never below ``ratio``. The paper uses these ratios for one epoch each, and 0.001 after
them. :meth:`~gckernels.Compressor.at_step` returns the compressor of a step, which ``sync.attach`` uses; the operators
always send ``ratio``.

The owner of a shard sparsifies the mean of the payloads again, without momentum and clipping, and with a separate
residual, so that the second phase sends no more than the first.

``g``, ``u`` and ``v`` are read once, and ``u`` and ``v`` written once, whether the bound is trimmed or not. With fp32
gradients this is 20 bytes per element, plus the payload, the sample, and the few elements that reach its bound. On a
GPU ``g``, ``u`` and ``v`` are read once more if values are not sent in fp32. Clipping reads ``g`` once more.

Wire format: that of ``toolkit/sparsifier``, with ``k = ceil(numel * ratio)``: header, then ``highs``, ``lows``,
``scales`` and ``values`` as in ``toolkit/sparsifier/entries.py``.

Example: ``DGC(ratio=0.5)``, first step, ``g = [0, -3, 1, 0.5, 1, 1]``, hence k = 3, and ``u = v = g``. The sample is
all of ``v``, where 1 has rank 3. Four entries reach this bound, and three of them are sent::

    bytes  0..15  47 4B 43 31 00 .. 00                               status word
    bytes 16..31  4A 00 00 00 00 .. 00                               bits 0 + 1, 1 + 2 and 2 + 4
    bytes 32..47  00 00 40 C0 00 00 80 3F 00 00 80 3F 00 00 00 00    -3.0, 1.0, 1.0
    decoded [0, -3, 1, 0, 1, 0], residual u and v [0, 0, 0, 0.5, 0, 1, 0, 0, 0, 0.5, 0, 1]
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from ..compressor import Traits
from ..registration import register
from ..toolkit.fields import require_float, require_in, shown
from ..toolkit.sparsifier import Sparsifier
from ..toolkit.sparsifier.selection import Sampled
from ..toolkit.sparsifier.states import Accumulation

_RAMP = (0.25, 0.0625, 0.015625, 0.004)


@register
@dataclass(frozen=True)
class DGC(Sparsifier):
    """The largest entries, at most ``ceil(numel * ratio)``, of a local momentum (see the module's docstring).

    Attributes:
        ratio: share of the entries that is sent, above 0 and at most 1.
        momentum: factor on the velocity in every step, a float from 0.0 to below 1.0.
        nesterov: whether the momentum is Nesterov's.
        clip: limit of the norm of the sum of all ranks' gradients, assuming that these are independent, a float above
            0; ``None`` for no limit.
        workers: number of ranks, at least 1; each of them clips to ``clip / sqrt(workers)``.
        warmup_steps: number of steps in which the ratio falls, at least 0.
        value_bits: 32 (fp32), 16 (bf16), or 8, 4 or 2 bits of codes with a scale for every 64 entries.

    Raises:
        ValueError: for any other value.
    """

    selection = Sampled(trim=True)

    ratio: float = 0.01
    momentum: float = 0.9
    nesterov: bool = False
    clip: float | None = None
    workers: int = 1
    warmup_steps: int = 0
    value_bits: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        require_float("DGC", "momentum", self.momentum, 0.0, 1.0)
        require_in("DGC", "nesterov", self.nesterov, (False, True))
        if self.nesterov and not self.momentum:
            raise ValueError(f"DGC: momentum must be above 0 with nesterov, got {shown(self.momentum)}")
        if self.clip is not None:
            require_float("DGC", "clip", self.clip, 2.0**-126, math.inf)
        for field, smallest in (("workers", 1), ("warmup_steps", 0)):
            value = getattr(self, field)
            if type(value) is not int or not smallest <= value < 2**63:
                raise ValueError(f"DGC: {field} must be an int from {smallest} up, got {shown(value)}")

    @functools.cached_property
    def traits(self) -> Traits:
        return Traits(
            needs_feedback=True,
            stochastic=True,
            conserves=not self.momentum and self.clip is None,
            states=self.accumulation.states,
            applies_momentum=self.momentum > 0,
        )

    @property  # not cached: torch.compile traces it
    def accumulation(self) -> Accumulation:
        max_norm = None if self.clip is None else self.clip / math.sqrt(self.workers)
        return Accumulation(self.momentum, self.nesterov, max_norm)

    @functools.cached_property
    def shard_compressor(self) -> DGC:
        plain = {"momentum": 0.0, "nesterov": False, "clip": None, "workers": 1, "warmup_steps": 0}
        return dataclasses.replace(self, **plain)  # type: ignore[arg-type]

    @functools.cached_property
    def schedule(self) -> tuple[tuple[int, DGC], ...]:
        methods: dict[int, DGC] = {}
        for index, ratio in enumerate((*_RAMP, self.ratio)):
            first = -(-self.warmup_steps * index // len(_RAMP))
            method = dataclasses.replace(self, ratio=max(ratio, self.ratio), warmup_steps=0)
            if first in methods or method not in methods.values():  # replace a ratio of no steps, repeat none
                methods[first] = method
        return tuple(methods.items())
