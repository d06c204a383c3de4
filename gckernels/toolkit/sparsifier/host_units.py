"""The calls of the sparsifiers' C functions, for many units with the same tensors in every step."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...codec import SEED_MASK, Decoding, Encoding, number_in
from ..host.calls import Seeding
from ..host.library import PART
from ..host.threads import get_num_threads, run_parts
from .entries import BLOCK
from .host_calls import DecodeCall, EncodeCall

_SHARED = 2 * PART  # tiles of a unit that several threads work on
_SAMPLED_PART, _WRITTEN_PART = 16, 512


class EncodeUnits:
    """Encodes all of its units when it is called.

    Args:
        built: the compiled functions.
        units: the units.
        seeds: how the units' seeds are used.
    """

    def __init__(self, built: Any, units: Sequence[Encoding], seeds: Seeding) -> None:
        self._built, self._units, self._added = built, units, seeds.added
        self._calls, self._alone = _in_order([EncodeCall.of(unit, seeds.mask) for unit in units])
        self._nbytes = [built.lay_out(ctypes.byref(call), None) for call in self._calls]

    def __call__(self) -> None:
        added = 0 if self._added is None else number_in(self._added) & SEED_MASK
        alone = self._alone.on(get_num_threads())
        run_parts(functools.partial(self._encode_alone, added), alone, self._alone.min_part)
        for number in range(alone, len(self._calls)):
            self._encode_shared(self._calls[number], self._nbytes[number], added)

    def _encode_alone(self, added: int, start: int, stop: int) -> None:
        """Encode units ``start`` to ``stop``, one after the other."""
        built, unit = self._built, start
        buffers = _bytes(max(self._nbytes[start:stop], default=0))
        while (unit := built.encode_units(self._calls, unit, stop, added, buffers.data_ptr())) < stop:
            self._search(self._calls[unit])
            built.emit_alone(ctypes.byref(self._calls[unit]))
            unit += 1

    def _encode_shared(self, call: EncodeCall, nbytes: int, added: int) -> None:
        """Encode one unit on several threads."""
        built, where, chunks = self._built, ctypes.byref(call), call.payloads.chunks
        buffers = _bytes(nbytes)
        built.lay_out(where, buffers.data_ptr())
        call.select.added = added
        run = functools.partial(_run, where)
        run(built.add_squares, call.tiles, PART)
        built.limit_norm(where)
        run(built.take_samples, chunks * call.select.sample_blocks, _SAMPLED_PART)
        built.bound_keys(where, 0, chunks)
        run(built.collect, call.tiles, PART)
        built.narrow(where, 0, chunks)
        self._search(call)
        run(built.count_entries, call.tiles, PART)
        built.place_entries(where, 0, chunks)
        run(built.emit_entries, call.tiles, PART)
        run(built.write_entries, chunks * -(-call.payloads.k // BLOCK), _WRITTEN_PART)

    def _search(self, call: EncodeCall) -> None:
        """Search the chunks whose candidates will not do as a whole."""
        built, where, chunk = self._built, ctypes.byref(call), -1
        while (chunk := built.missing_from(where, chunk + 1)) >= 0:
            everything = torch.empty(call.payloads.size, dtype=torch.float32, device="cpu")
            call.select.all, call.select.searched = everything.data_ptr(), chunk
            _run(where, built.load_all, call.payloads.tiles, PART)
            built.narrow_all(where)


class DecodeUnits:
    """Decodes all of its units when it is called.

    Args:
        built: the compiled functions.
        units: the units.
        scale: factor of all results.
        accumulate: whether results are added to the outputs.
    """

    def __init__(self, built: Any, units: Sequence[Decoding], scale: float, accumulate: bool) -> None:
        self._built, self._units = built, units
        self._calls, self._alone = _in_order([DecodeCall.of(unit, scale, accumulate) for unit in units])

    def __call__(self) -> None:
        alone = self._alone.on(get_num_threads())
        run_parts(self._decode_alone, alone, self._alone.min_part)
        for call in self._calls[alone:]:
            self._decode_shared(call)

    def _decode_alone(self, start: int, stop: int) -> None:
        """Decode units ``start`` to ``stop``, one after the other."""
        starts = _bytes(8 * max((call.starts_count for call in self._calls[start:stop]), default=0))
        self._built.decode_units(self._calls, start, stop, starts.data_ptr())

    def _decode_shared(self, call: DecodeCall) -> None:
        """Decode one unit on several threads."""
        starts, where = _bytes(8 * call.starts_count), ctypes.byref(call)
        call.starts = starts.data_ptr()
        strings = call.sources * call.payloads.chunks
        _run(where, self._built.find_starts, strings, -(-PART // call.payloads.tiles))
        _run(where, self._built.decode, call.tiles, PART)


def _run(where: Any, function: Any, count: int, part: int) -> None:
    """Call ``function(where, start, stop)`` for parts of ``count``."""
    run_parts(functools.partial(function, where), count, part)


@dataclass(frozen=True)
class _Alone:
    """The units that one thread each works on, the first ones.

    Attributes:
        small: their number with several threads.
        count: the number of all units, which one thread works on alone.
        min_part: the number of them that is worth another thread.
    """

    small: int
    count: int
    min_part: int

    def on(self, threads: int) -> int:
        """Their number with ``threads`` threads."""
        return self.count if threads == 1 else self.small


def _in_order(calls: Sequence[Any]) -> tuple[Any, _Alone]:
    """The calls side by side in memory, small ones first."""
    small, large, tiles = [], [], 0
    for call in calls:
        of_call = call.payloads.chunks * call.payloads.tiles
        if of_call < _SHARED:
            small.append(call)
            tiles += of_call
        else:
            large.append(call)
    alone = _Alone(len(small), len(calls), -(-PART * len(small) // max(1, tiles)))
    return (type(calls[0]) * len(calls))(*small, *large), alone


def _bytes(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
