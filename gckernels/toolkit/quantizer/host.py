"""The host path of element-wise quantisers: ``host.c``, compiled together with the functions of one quantiser."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch

from ...codec import Backend, Decoding, Encoding, Recoding, Work, number_in
from ..host.c_forms import HELPERS, lower
from ..host.calls import BATCHES, HostCalls
from ..host.library import COMMON, DTYPES, PART, TILE, VECTORS, declare, library, warn_once
from ..host.sources import program_text
from ..host.structs import c_structs, pointer
from ..host.threads import run_parts
from ..lowering import FLOAT, INT, NotLowered
from ..payload import STATUS_OK
from ..reference import REFERENCE
from .maps import Statistic

_TEMPLATE = "host.c"


class _Call(ctypes.Structure):
    """Arguments of the functions in ``host.c``, as ``call_t``."""

    _fields_ = (
        ("source", pointer(const=True)),  # the gradient, or payloads
        ("residual", pointer()),  # fp32, or in 8 bits, or None
        ("payload", pointer(ctypes.c_uint8)),  # the payload to write; when decoding, the payloads to read
        ("out", pointer()),  # the output of decoding
        ("partials", pointer(ctypes.c_float)),  # [chunks * tiles, terms], for the statistic of a whole chunk
        *(
            (name, ctypes.c_int64) for name in ("numel", "size", "tiles")
        ),  # elements of unit and chunk; tiles of a chunk
        *((name, ctypes.c_int64) for name in ("payload_stride", "sources", "source_stride")),
        *((name, ctypes.c_int64) for name in ("blocks", "stats_nbytes", "codes_offset", "codes_nbytes")),
        *(
            ("seed", ctypes.c_uint64),
            ("scale", ctypes.c_float),
            ("dtype", ctypes.c_int32),
            ("accumulate", ctypes.c_int32),
            ("is_encoded", ctypes.c_int32),  # whether the residual is in 8 bits
        ),
    )


class QuantizerHost(Backend):
    """The host path of quantisers. Units that are bound together take one call of each function of the C program."""

    def encode(self, unit: Encoding, scale: float = 1.0) -> None:
        built = build(unit.compressor, merging=False)
        if built is None:
            REFERENCE.encode(unit, scale)
            return
        _encode(built, _encoding(unit), unit.payload.shape[0])

    def compile(self, compressor: Any, recodes: bool) -> None:
        build(compressor, merging=False)
        if recodes:
            build(compressor.shard_compressor, merging=True)

    def decode(self, unit: Decoding, scale: float = 1.0, accumulate: bool = False) -> None:
        built = build(unit.compressor, merging=False)
        if built is None:
            REFERENCE.decode(unit, scale, accumulate)
            return
        call = _decoding(unit, scale, accumulate)
        run_parts(functools.partial(built.decode, ctypes.byref(call)), unit.payloads.shape[1] * call.tiles, PART)

    def recode(self, unit: Recoding, scale: float = 1.0) -> None:
        built = build(unit.compressor.shard_compressor, merging=True)
        if built is None:
            REFERENCE.recode(unit, scale)
            return
        _encode(built, _recoding(unit, scale), 1)

    def bind_encodes(self, units: Sequence[Encoding], scale: float = 1.0, added: torch.Tensor | None = None) -> Work:
        built = build(units[0].compressor, merging=False)
        if built is None:
            return super().bind_encodes(units, scale, added)
        chunks = [unit.payload.shape[0] for unit in units]
        return _bind_encodes(built, [_encoding(unit) for unit in units], chunks, added)

    def bind_decodes(self, units: Sequence[Decoding], scale: float = 1.0, accumulate: bool = False) -> Work:
        built = build(units[0].compressor, merging=False)
        if built is None:
            return super().bind_decodes(units, scale, accumulate)
        calls = [_decoding(unit, scale, accumulate) for unit in units]
        tiles = [call.tiles * unit.payloads.shape[1] for call, unit in zip(calls, units, strict=True)]
        return functools.partial(HostCalls(calls, tiles).run, built.decode_batch)

    def bind_recodes(self, units: Sequence[Recoding], scale: float = 1.0, added: torch.Tensor | None = None) -> Work:
        built = build(units[0].compressor.shard_compressor, merging=True)
        if built is None:
            return super().bind_recodes(units, scale, added)
        return _bind_encodes(built, [_recoding(unit, scale) for unit in units], [1] * len(units), added)


# -------------------------------------------------------------------- calls


def _encoding(unit: Encoding) -> _Call:
    grad, payload = unit.grad, unit.payload
    call = _call(unit, grad.numel(), payload, payload.stride(0), dtype=DTYPES[grad.dtype], seed=unit.seed)
    return _with_source(call, grad, unit.residual)


def _recoding(unit: Recoding, scale: float) -> _Call:
    call = _call(unit, unit.numel, unit.payload, 0, seed=unit.seed, scale=scale)
    call.sources, call.source_stride = unit.payloads.shape[0], unit.payloads.stride(0)
    return _with_source(call, unit.payloads, unit.residual)


def _decoding(unit: Decoding, scale: float, accumulate: bool) -> _Call:
    payloads, out = unit.payloads, unit.out
    call = _call(unit, out.numel(), payloads, payloads.stride(1), dtype=DTYPES[out.dtype], scale=scale)
    call.sources, call.source_stride = payloads.shape[0], payloads.stride(0)
    call.out, call.accumulate = out.data_ptr(), accumulate
    return call


def _with_source(call: _Call, source: torch.Tensor, residual: torch.Tensor | None) -> _Call:
    call.source = source.data_ptr()
    call.residual = None if residual is None else residual.data_ptr()
    call.is_encoded = residual is not None and residual.dtype == torch.uint8
    return call


def _call(unit: Any, numel: int, payload: torch.Tensor, payload_stride: int, **values: Any) -> _Call:
    quantizer, size = unit.compressor, unit.size  # the payload of a shard has the same layout
    layout = quantizer.layout(size)
    stats = layout["stats"] if quantizer.num_stats else None
    return _Call(
        payload=payload.data_ptr(),
        payload_stride=payload_stride,
        numel=numel,
        size=size,
        tiles=max(1, -(-size // _tile_numel(quantizer.block))),
        blocks=stats.count // quantizer.num_stats if stats else 0,
        stats_nbytes=stats.nbytes if stats else 0,
        codes_offset=layout["codes"].offset,
        codes_nbytes=layout["codes"].nbytes,
        **{"scale": 1.0} | values,
    )


def _encode(built: ctypes.CDLL, call: _Call, chunks: int) -> None:
    where = ctypes.byref(call)
    tiles = chunks * call.tiles
    if built.terms:
        partials = torch.empty(tiles * built.terms, dtype=torch.float32, device="cpu")
        call.partials = partials.data_ptr()
        run_parts(functools.partial(built.partials, where), tiles, PART)
        built.finish_chunks(where, 0, chunks)
    run_parts(functools.partial(built.encode, where), tiles, PART)


def _bind_encodes(built: Any, calls: list[_Call], chunks: list[int], added: torch.Tensor | None) -> Work:
    tiles = [call.tiles * number for call, number in zip(calls, chunks, strict=True)]
    partials = torch.empty(sum(tiles) * built.terms, dtype=torch.float32, device="cpu")
    for call, first in zip(calls, accumulate(tiles, initial=0), strict=False):
        call.partials = partials.data_ptr() + 4 * built.terms * first
    by_tile, by_chunk = HostCalls(calls, tiles), HostCalls(calls, chunks)

    def work() -> None:
        if partials.numel():
            by_tile.run(built.partials_batch)
            by_chunk.run(built.finish_chunks_batch)
        by_tile.run(built.encode_batch, number_in(added))

    return work


# -------------------------------------------------------------------- the program


@functools.cache
def build(quantizer, merging: bool) -> Any:
    """The compiled functions of a quantiser, or ``None`` if they cannot be compiled.

    Their attribute ``terms`` is the number of terms of a statistic of the whole unit, 0 for all other quantisers.
    """
    try:
        source = program(quantizer, merging)
    except NotLowered as error:
        warn_once(f"{quantizer.name} cannot be compiled: {error}")
        return None
    built: Any = library(source)
    if built is None:
        return None
    names = ("encode", "decode", "partials", "finish_chunks")
    declare(built, *names, *(f"{name}_batch" for name in names))
    statistic = quantizer.maps.statistic
    built.terms = len(statistic.kinds) if statistic and quantizer.block is None else 0
    return built


def program(quantizer, merging: bool) -> str:
    """The source of the C program of one quantiser.

    Args:
        quantizer: the quantiser.
        merging: whether the program encodes the mean of payloads instead of a gradient.

    Raises:
        NotLowered: a function of the quantiser has no C form, or blocks do not fill tiles.
    """
    if quantizer.block and TILE % quantizer.block and quantizer.block % TILE:
        raise NotLowered(f"block={quantizer.block} neither divides {TILE} nor is a multiple of it")
    statistic, shortcut = quantizer.maps.statistic, quantizer.shortcut
    kinds = statistic.kinds if statistic else ()
    quick_kinds = shortcut.statistic.kinds if shortcut else ()
    tile = _tile_numel(quantizer.block)
    defines = {
        "BITS": quantizer.bits,
        "BLOCK": quantizer.block or tile,
        "TILE": tile,
        "WHOLE": int(_whole(quantizer)),
        "STATS": quantizer.num_stats,
        "TERMS": max(1, len(kinds)),
        "SHORTCUT": int(shortcut is not None),
        "QUICK_TERMS": len(quick_kinds),
        "STAT_BF16": int(quantizer.stats_dtype == torch.bfloat16),
        "RANDOM": int(quantizer.traits.stochastic),
        "DITHER_BASE": quantizer.maps.dither_base,
        "MERGING": int(merging),
        "STATUS": STATUS_OK,
    }
    return "\n".join(
        [
            COMMON,
            VECTORS,
            *(f"#define {name} {value}" for name, value in defines.items()),
            f"#define EACH_TERM(X) {_each_of(kinds)}",
            f"#define EACH_QUICK_TERM(X) {_each_of(quick_kinds)}",
            HELPERS,
            *(f"static inline {head} {{ {' '.join(body)} }}" for head, body in _functions(quantizer)),
            c_structs(call_t=_Call),
            BATCHES,
            program_text(__package__, _TEMPLATE),
        ]
    )


def c_source(quantizer) -> str:
    """The C functions generated from a quantiser's torch functions, with one statement per line.

    Raises:
        NotLowered: a function has no C form.
    """
    functions = [
        f"static inline {head.replace('OPTIONAL ', '')} {{\n" + "".join(f"    {line}\n" for line in body) + "}\n"
        for head, body in _functions(quantizer)
    ]
    return "\n".join(functions)


def _functions(quantizer) -> list[tuple[str, list[str]]]:
    """The head and the statements of every function."""
    maps, constants, statistic = quantizer.maps, quantizer.constants, quantizer.maps.statistic
    stats = [f"s[{index}]" for index in range(quantizer.num_stats)]
    quantize, dequantize = maps.quantize, maps.dequantize
    functions = [
        _function("accumulate", "float g, float r", maps.accumulate, "g", "r", constants),
        _function("keep", "float v, float d", maps.keep, "v", "d", constants),
        _function("merge", "float total, float scale", maps.merge, "total", "scale", constants),
        _function(
            "quantize", "float v, const float *s, float dither", quantize, "v", stats, "dither", constants, kind=INT
        ),
        _function("dequantize", "int32_t c, const float *s", dequantize, ("c", INT), stats, constants),
    ]
    if statistic:
        functions += _functions_of(statistic, "", constants, stats)
    if shortcut := quantizer.shortcut:
        functions += _functions_of(shortcut.statistic, "quick_", constants, stats)
        partials = _partials(shortcut.statistic)
        functions.append(_function("quick_holds", "const float *p", shortcut.holds, partials, constants, kind=INT))
    return functions


def _functions_of(statistic: Statistic, prefix: str, constants: Any, stats: list[str]) -> list[tuple[str, list[str]]]:
    """The head and the statements of the functions of a statistic."""
    functions = []
    for index in range(len(statistic.kinds)):
        term = _component(statistic.terms, index)
        functions.append(_function(f"{prefix}term_{index}", "float v", term, "v", constants))
    body = lower(statistic.finish, [_partials(statistic), "count", constants], stats)
    return [*functions, (f"void {prefix}finish(const float *p, OPTIONAL float count, float *s)", body)]


def _partials(statistic: Statistic) -> list[str]:
    return [f"p[{index}]" for index in range(len(statistic.kinds))]


def _each_of(kinds: tuple[str, ...]) -> str:
    """The terms as arguments of a C macro, with their numbers."""
    return " ".join(f"X({index}, {kind.upper()})" for index, kind in enumerate(kinds))


def _component(terms: Any, index: int) -> Any:
    return lambda *arguments: terms(*arguments)[index]


def _function(name: str, parameters: str, function: Any, *inputs: Any, kind: str = FLOAT) -> tuple[str, list[str]]:
    declared = ", ".join(f"OPTIONAL {each}" for each in parameters.split(", "))
    return f"{kind} {name}({declared})", [f"{kind} result;", *lower(function, inputs, ["result"]), "return result;"]


def _whole(quantizer) -> bool:
    return quantizer.block is None and quantizer.maps.statistic is not None


def _tile_numel(block: int | None) -> int:
    return max(TILE, block or 0)
