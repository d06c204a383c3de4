"""The host path of element-wise quantisers: ``host.c``, compiled together with the functions of one quantiser."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ...codec import Decoding, Encoding, Recoding, Work
from ..host.backend import HostBackend
from ..host.c_forms import HELPERS, lower
from ..host.calls import HostCall, HostCalls, Seeding, batches
from ..host.library import COMMON, TILE, VECTORS, declare, defined, library, warn_once
from ..host.sources import program_text
from ..host.structs import pointer
from ..lowering import FLOAT, INT, NotLowered
from ..payload import STATUS_OK
from .maps import Statistic

_TEMPLATE = "host.c"


class _Call(HostCall):
    """Arguments of the functions in ``host.c``, as ``call_t``."""

    _fields_ = (
        ("partials", pointer(ctypes.c_float)),  # [chunks * tiles, terms], for the statistic of a whole chunk
        *((name, ctypes.c_int64) for name in ("blocks", "stats_nbytes", "codes_offset", "codes_nbytes")),
        ("is_encoded", ctypes.c_int32),  # whether the residual is in 8 bits
    )


class QuantizerHost(HostBackend):
    """The host path of quantisers."""

    def compile(self, compressor: Any, recodes: bool) -> None:
        build(compressor, merging=False)
        if recodes:
            build(compressor.shard_compressor, merging=True)

    def encoder(self, units: Sequence[Encoding], scale: float, seeds: Seeding) -> Work | None:
        built = build(units[0].compressor, merging=False)
        calls = [_Call.encoding(unit, **_places(unit.compressor, unit.size), **_form(unit)) for unit in units]
        return built and _encoder(built, calls, seeds)

    def decoder(self, units: Sequence[Decoding], scale: float, accumulate: bool) -> Work | None:
        built = build(units[0].compressor, merging=False)
        calls = [_Call.decoding(unit, scale, accumulate, **_places(unit.compressor, unit.size)) for unit in units]
        return built and HostCalls(calls).work(built.decode_batch)

    def recoder(self, units: Sequence[Recoding], scale: float, seeds: Seeding) -> Work | None:
        built = build(units[0].compressor.shard_compressor, merging=True)
        calls = [_Call.recoding(unit, scale, **_places(unit.compressor, unit.size), **_form(unit)) for unit in units]
        return built and _encoder(built, calls, seeds)


@functools.lru_cache(maxsize=65536)  # every call needs them
def _places(quantizer: Any, size: int) -> dict[str, int]:
    """Facts about payloads of ``size`` elements; those of a shard have the same layout."""
    layout = quantizer.layout(size)
    codes, stats = layout["codes"], layout["stats"] if quantizer.num_stats else None
    return {
        "tiles": max(1, -(-size // _tile_numel(quantizer.block))),
        "blocks": stats.count // quantizer.num_stats if stats else 0,
        "stats_nbytes": stats.nbytes if stats else 0,
        "codes_offset": codes.offset,
        "codes_nbytes": codes.nbytes,
    }


def _form(unit: Encoding | Recoding) -> dict[str, bool]:
    return {"is_encoded": unit.residual is not None and unit.residual.dtype == torch.uint8}


def _encoder(built: Any, calls: Sequence[_Call], seeds: Seeding) -> Work:
    if not built.terms:
        return HostCalls(calls, seeds).work(built.encode_batch)
    partials = torch.empty(
        sum([call.chunks * call.tiles for call in calls]) * built.terms, dtype=torch.float32, device="cpu"
    )
    place = partials.data_ptr()
    for call in calls:
        call.partials = place
        place += 4 * built.terms * call.chunks * call.tiles
    together = HostCalls(calls, seeds)

    def work(partials: torch.Tensor = partials) -> None:  # kept as long as the function
        together.run(built.partials_batch)
        together.run_chunks(built.finish_chunks_batch)
        together.run(built.encode_batch)

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
    declare(built, "encode_batch", "decode_batch", "partials_batch", "finish_chunks_batch")
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
    defines = defined(
        BITS=quantizer.bits,
        BLOCK=quantizer.block or tile,
        TILE=tile,
        WHOLE=int(_whole(quantizer)),
        STATS=quantizer.num_stats,
        TERMS=max(1, len(kinds)),
        SHORTCUT=int(shortcut is not None),
        QUICK_TERMS=len(quick_kinds),
        STAT_BF16=int(quantizer.stats_dtype == torch.bfloat16),
        RANDOM=int(quantizer.traits.stochastic),
        DITHER_BASE=quantizer.maps.dither_base,
        MERGING=int(merging),
        STATUS=STATUS_OK,
    )
    return "\n".join(
        [
            COMMON,
            VECTORS,
            defines,
            f"#define EACH_TERM(X) {_each_of(kinds)}",
            f"#define EACH_QUICK_TERM(X) {_each_of(quick_kinds)}",
            HELPERS,
            *(f"static inline {head} {{ {' '.join(body)} }}" for head, body in _functions(quantizer)),
            batches(_Call),
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
