"""How kernels encode for :mod:`~gckernels.toolkit.sparsifier`: find candidates, narrow them, emit, write.

A lower bound from a sample (``selection_kernels.py``) makes few elements candidates. One pass over the gradient marks
them and leaves all others in the states (``candidates_kernels.py``). The entries are found among the candidates alone
(``narrowing_kernels.py``). The entries are put side by side (``emit_kernels.py``) and written (``entries_kernels.py``).
In small chunks one program finds and emits the entries, without candidates.

If entries are not sent exactly, the states need another pass: an entry whose error is not finite keeps its old states,
and whether it is an entry is not known before.
"""

from __future__ import annotations

from typing import Any

import torch
import triton

from ...codec import Encoding
from ..constants import Constants, constants
from ..kernels.launch import launch, temporary
from ..tiles import chunk_step
from . import candidates_kernels, emit_kernels, entries_kernels, narrowing_kernels, selection_kernels
from .candidates_kernels import MAX_RUNS, WORD
from .keys import MAX_SAMPLE_STRIDE, MIN_SAMPLE, require_size
from .narrowing_kernels import MAX_PROGRAMS, NUM_WARPS, TILE
from .rules import Narrowing
from .selection_kernels import BINS, DIGITS, SAMPLES
from .states import kernel_source

_SMALL_TILES = (256, 1024, 4096)
SMALL = _SMALL_TILES[-1]
"""Elements of a chunk that one program holds in its registers."""
_SAMPLED = 1024  # samples that a program reads
_DIGITS_OF = {Narrowing.NONE: 0, Narrowing.LEADING: 2, Narrowing.EXACT: DIGITS}


def encode(unit: Encoding, scale: float = 1.0) -> None:
    """Launch the encoding of a unit."""
    require_size(unit.compressor.name, unit.size)
    if unit.size <= SMALL:
        _Work(unit).encode()
    else:
        _LargeWork(unit).encode()


class _Work:
    """The launches that encode a unit whose chunks one program holds in its registers, and what they share."""

    def __init__(self, unit: Encoding) -> None:
        compressor, payload, size = unit.compressor, unit.payload, unit.size
        self._source, present = kernel_source(compressor.accumulation, unit.grad, unit.residual)
        self._unit, self._rule, self._exact = unit, compressor.selection.rule, compressor.value_bits == 32
        self._chunks, self._k = payload.shape[0], compressor.capacity(size)
        self._extent = unit.grad.numel(), chunk_step(size, self._chunks)
        self._has_residual, self._has_velocity = present["has_residual"], present["has_velocity"]
        self._digits = _DIGITS_OF[self._rule.narrowing]
        self._constants: dict[str, Any] = present | {
            "by_sample": self._rule.by_sample,
            "digits": self._digits,  # how many digits of a key are found among the candidates
            "exact": self._exact,
            "left": self._has_residual and self._exact,  # the states have all elements but the candidates
        }
        self._bounds = self._new(4)
        self._highs = compressor.layout(size)["highs"]
        self._entries = self._new(self._k), self._new(self._k, torch.float32)
        sends_velocities = self._has_velocity and not self._exact
        self._velocities = self._new(self._k, torch.float32) if sends_velocities else self._entries[1]

    def _new(self, columns: int, dtype: torch.dtype = torch.int32, zeroed: bool = False) -> torch.Tensor:
        return temporary(self._chunks, columns, dtype=dtype, device=self._unit.payload.device, zeroed=zeroed)

    def encode(self) -> None:
        """Launch everything."""
        self._find_entries()
        states = (self._source[1], self._source[2]) if self._has_residual else None
        unit = self._unit
        entries_kernels.write(
            unit.compressor, *self._entries, self._velocities, self._bounds, states, unit.payload, unit.size
        )

    def _with(self, **more: Any) -> Constants:
        """The compile-time constants of a kernel, with ``more`` than those of all kernels that select."""
        return constants(**self._constants, **more)

    def _find_entries(self) -> None:
        tile = next(each for each in _SMALL_TILES if each >= self._unit.size)
        launch(
            emit_kernels._select_kernel,
            (1, self._chunks),
            *(*self._source, self._bounds, *self._entries, self._velocities, self._unit.payload, *self._extent),
            *(self._k, self._unit.payload.stride(0), self._highs.nbytes // 4, self._rule.key, self._unit.seed),
            C=self._with(tile=tile, samples=min(tile, 2 * MIN_SAMPLE) if self._rule.by_sample else 0),
            num_warps=max(1, min(tile // 256, 16)),
        )


class _LargeWork(_Work):
    """The launches that encode a unit by candidates, and what they share."""

    def __init__(self, unit: Encoding) -> None:
        super().__init__(unit)
        size = unit.size
        # four times as many as are sent, and some for samples in which hardly any of them are
        self._room = max(1, min(size, 4 * self._k + size // 256 + TILE))
        self._tile = candidates_kernels.TILE if self._has_residual else candidates_kernels.PLAIN_TILE
        self._tiles = max(1, triton.cdiv(size, self._tile))
        self._tiles_per_run = triton.cdiv(self._tiles, MAX_RUNS)
        self._programs = max(1, min(MAX_PROGRAMS, triton.cdiv(size, 4 * TILE)))
        self._totals = self._new(1)
        self._words = self._new(self._tiles * self._tile // WORD)
        self._runs = self._new(triton.cdiv(self._tiles, self._tiles_per_run))
        self._counts, self._numbers = self._new(DIGITS * BINS), self._new(2 * self._programs)
        self._indices, self._listed = self._new(self._room), self._new(self._room, torch.float32)

    def _find_entries(self) -> None:
        self._bound()
        self._find_candidates()
        for digit in range(self._digits):
            self._launch_narrowing(narrowing_kernels._digit_kernel, digit=digit)
        self._launch_narrowing(
            narrowing_kernels._count_kernel, (self._numbers,), maxnreg=narrowing_kernels.COUNT_MAXNREG
        )
        self._launch_narrowing(
            emit_kernels._emit_kernel,
            (self._numbers, *self._entries, self._velocities, self._unit.payload),
            (self._unit.payload.stride(0), self._highs.nbytes // 4),
        )

    def _bound(self) -> None:
        """Bound the candidates of all chunks from below, and clear what later launches count in."""
        size, by_sample = self._unit.size, self._rule.by_sample
        in_sample = max(2 * MIN_SAMPLE, size // MAX_SAMPLE_STRIDE) if by_sample else SAMPLES
        in_sample = 0 if self._rule.key else in_sample
        samples, counts, counted = self._listed, self._counts, False
        if in_sample:
            samples = self._new(in_sample, torch.float32)
            launch(
                selection_kernels._sample_kernel,
                (triton.cdiv(in_sample, _SAMPLED), self._chunks),
                *(*self._source, samples, in_sample, *self._extent, self._unit.seed),
                C=self._with(tile=_SAMPLED),
            )
        if in_sample > SAMPLES:
            counts, counted = self._new(DIGITS * BINS, zeroed=True), True
            for digit in range(DIGITS):
                launch(
                    selection_kernels._sample_digit_kernel,
                    (min(triton.cdiv(in_sample, TILE), MAX_PROGRAMS), self._chunks),
                    *(samples, counts, in_sample, *self._extent, self._k),
                    C=constants(tile=TILE, digit=digit),
                    num_warps=NUM_WARPS,
                )
        block = triton.next_power_of_2(in_sample) if 0 < in_sample <= SAMPLES else 0
        launch(
            selection_kernels._bound_kernel,
            (1, self._chunks),
            *(samples, counts, self._bounds, self._runs, self._runs.stride(0), self._counts, in_sample),
            *(*self._extent, self._k, self._rule.key),
            C=constants(by_sample=by_sample, digits=self._digits, counted=counted, samples=block),
            num_warps=max(4, min(block // 1024, 16)),
        )

    def _find_candidates(self) -> None:
        """Mark the candidates, leave all other elements in the states, and list the candidates."""
        self._mark(marks=True, leaves=self._has_residual and self._exact)
        launch(
            candidates_kernels._list_kernel,
            (self._runs.stride(0), self._chunks),
            *(self._bounds, self._words, self._runs, self._totals, self._indices),
            *(self._words.stride(0), self._runs.stride(0), self._tiles_per_run * (self._tile // WORD)),
            *(self._k, self._room),
            C=constants(by_sample=self._rule.by_sample, digits=self._digits),
        )
        if self._has_residual and not self._exact:  # now that it is known whether the candidates suffice
            self._mark(marks=False, leaves=True)

    def _mark(self, marks: bool, leaves: bool) -> None:
        launch(
            candidates_kernels._mark_kernel,
            (self._tiles, self._chunks),
            *(*self._source, self._bounds, self._words, self._runs, self._totals),
            *(self._words.stride(0), self._runs.stride(0), *self._extent, self._tiles_per_run, self._k, self._room),
            C=self._with(tile=self._tile, marks=marks, leaves=leaves),
            num_warps=candidates_kernels.NUM_WARPS,
            maxnreg=candidates_kernels.MAXNREG_WITH_VELOCITY if self._has_velocity else None,
        )

    def _launch_narrowing(
        self,
        kernel: Any,
        outputs: tuple[torch.Tensor, ...] = (),
        numbers: tuple[int, ...] = (),
        maxnreg: int | None = None,
        **more: int,
    ) -> None:
        """Launch a kernel that reads candidates, or all elements of chunks whose candidates are missing."""
        launch(
            kernel,
            (self._programs, self._chunks),
            *(*self._source, self._bounds, self._words, self._totals, self._indices, self._listed, self._counts),
            *(*outputs, self._words.stride(0), *self._extent, self._k, self._room, *numbers),
            C=self._with(tile=TILE, **more),
            num_warps=NUM_WARPS,
            maxnreg=maxnreg,
        )
