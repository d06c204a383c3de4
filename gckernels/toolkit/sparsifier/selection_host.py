"""The steps that selections take on the host: bounding the keys of every chunk, and counting the elements that pass."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from ...compressor import chunk_bounds
from ..host.library import PART
from ..host.threads import run_parts
from .host_calls import EncodeCall
from .keys import LEADING_SHIFT, MAX_FINITE_KEY, NAN_KEY, sample_rank, sample_stride

_SAMPLE_PART = 4096
_BINS = 2048  # keys are counted by their leading bits


class HostSelection:
    """The bounds of the keys that are sent of every chunk of a unit, and what is counted to find them.

    First one of the ``bound_*`` methods, then :meth:`count_entries`, then :meth:`narrow` where keys were kept.

    Args:
        built: the compiled functions.
        call: their argument; its part ``select`` is filled in here. The buffers live as long as this object.
        seed: seed of the samples.
    """

    def __init__(self, built: Any, call: EncodeCall, seed: int) -> None:
        self._built, self._call = built, call
        self._chunks, self._tiles = call.payloads.chunks, call.payloads.chunks * call.payloads.tiles
        self._bounds = torch.zeros(self._chunks, 4, dtype=torch.int64)
        self._bounds[:, 1] = MAX_FINITE_KEY
        self._entries = torch.empty(self._tiles, 3, dtype=torch.int64)
        call.select.bounds, call.select.entries = self._bounds.data_ptr(), self._entries.data_ptr()
        call.select.seed = seed

    def bound_by_key(self, key: int) -> None:
        """Let ``key`` be the lower bound of all chunks."""
        self._bounds[:, 0] = key

    def bound_by_leading_bits(self) -> torch.Tensor:
        """Bound the k-th largest key of every chunk by its leading 11 bits.

        Returns:
            How many keys of every chunk have these bits, int64 ``[chunks]``.
        """
        counts = torch.zeros(self._chunks, _BINS, dtype=torch.int64)
        self._call.select.counts = counts.data_ptr()
        self._run(self._built.count_keys)
        reaching = counts.flip(1).cumsum(1).flip(1)
        bins = ((reaching >= self._call.payloads.k).sum(1) - 1).clamp_(min=0)
        self._bounds[:, 0], self._bounds[:, 1] = bins << LEADING_SHIFT, ((bins + 1) << LEADING_SHIFT) - 1
        return counts.gather(1, bins[:, None])[:, 0]

    def bound_by_sample(self) -> None:
        """Let the lower bound of every chunk be the key in its sample whose rank corresponds to ``k``."""
        numel, size, k = (getattr(self._call.payloads, name) for name in ("numel", "size", "k"))
        select = self._call.select
        for chunk in range(self._chunks):
            first, last = chunk_bounds(numel, size, chunk)
            select.sample_first, select.sample_stride = first, sample_stride(last - first)
            keys = torch.empty((last - first) // select.sample_stride, dtype=torch.int32)
            select.keys = keys.data_ptr()
            self._run(self._built.take_sample, keys.numel(), _SAMPLE_PART)
            self._bounds[chunk, 0] = self._kth_largest(keys, sample_rank(k, last - first))

    def without_upper(self) -> torch.Tensor:
        """Let the upper bound of all chunks be the largest key.

        Returns:
            How many elements may be between the bounds of every chunk at most, int64 ``[chunks]``.
        """
        self._bounds[:, 1] = NAN_KEY
        return torch.full((self._chunks,), self._call.payloads.size)

    def count_entries(self, kept: torch.Tensor | None = None) -> None:
        """Count the elements of every tile that are above the bounds and between them.

        Args:
            kept: how many keys of every chunk are between its bounds at most, int64 ``[chunks]``, where
                :meth:`narrow` follows.
        """
        self._bounds[:, 0].clamp_(min=1)  # zeros are not sent
        if kept is not None:
            self._ends = kept.cumsum(0)
            self._firsts = self._ends - kept
            self._cursors = self._firsts.clone()
            self._keys = torch.empty(int(self._ends[-1]), dtype=torch.int32)  # pages that are not touched are not taken
            self._call.select.cursors, self._call.select.keys = self._cursors.data_ptr(), self._keys.data_ptr()
        self._run(self._built.count_entries)

    def narrow(self) -> None:
        """Let both bounds of every chunk be its k-th largest key, if that is not below the lower one, and count again.

        The keys between the bounds were kept, so the gradient is not read again.
        """
        for chunk in range(self._chunks):
            above = int(self._entries.view(self._chunks, -1, 3)[chunk, :, 0].sum())
            keys = self._keys[self._firsts[chunk] : self._cursors[chunk]]
            key = self._kth_largest(keys, self._call.payloads.k - above)
            self._bounds[chunk, :2] = max(int(self._bounds[chunk, 0]), key)
        self._run(self._built.count_again)

    def _kth_largest(self, keys: torch.Tensor, k: int) -> int:
        """``kth_largest`` of ``keys.py``, without sorting."""
        return int(self._built.kth_largest(keys.data_ptr(), keys.numel(), k))

    def _run(self, function: Any, count: int | None = None, part: int = PART) -> None:
        """Run a function for all tiles, or ``count`` of something else."""
        run_parts(functools.partial(function, ctypes.byref(self._call)), self._tiles if count is None else count, part)
