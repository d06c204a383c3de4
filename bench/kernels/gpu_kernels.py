"""The cases of ``cases.py`` on a GPU: CUDA graphs over sets of tensors that take turns, beside a copy of as many bytes.

Turns keep a call from finding its tensors in the L2 cache; rows of sizes that fit it all the same are marked
``in_l2``. Calls that cannot be captured as a graph have ``stream`` in the column ``timing``: the host's time may be in
theirs.
"""

from __future__ import annotations

import functools
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bench.lib.budget import Budget
from bench.lib.card import Card
from bench.lib.cases import BOUND, COMPILED, EAGER, FUSED, TORCH, Case, Tensors, all_specs, new_tensors
from bench.lib.faults import is_broken
from bench.lib.program import python_arguments
from bench.lib.timings import OVERHEAD_NUMEL, Recorder, Timing

MERGED_SOURCES = 8
BANDWIDTH_SIZES = ((2**26, "float32"), (2**24, "float32"), (2**26, "bfloat16"), (2**24, "bfloat16"))
"""Elements and dtypes that all configurations are measured with, what is needed most first."""
LARGE_NUMEL = 2**28
LARGE_SPECS = ("EFSignSGD", "BlockQuant", "TernGrad", "TopK")
PEER_NUMEL = 2**24
PEERS = ("BlockQuant", "EFSignSGD", "BlockQuant(bits=4)", "Cast16", "BlockFP8", "TernGrad", "QSGD", "OneBit")
"""Compressors whose references are compiled, what is needed most first."""
_FIRST = "BENCH_FIRST_CASE"  # the variable that tells a process which case it begins with
CASE_S, PEER_S = 2.0, 15.0  # seconds with fewer of which left no other case is begun


def bandwidth_cases() -> list[Case]:
    """Every configuration, with both dtypes, at the sizes where bandwidth counts and at that where the host does."""
    cases = []
    for numel, dtype in BANDWIDTH_SIZES:
        cases += [Case("copy", "copy", 1, TORCH, numel)] if dtype == "float32" else []
        cases += [case for spec in all_specs() for case in directions(spec, numel, dtype)]
        if (numel, dtype) == BANDWIDTH_SIZES[0]:
            cases += host_cost_cases()
    return cases + [case for spec in LARGE_SPECS for case in directions(spec, LARGE_NUMEL, "float32")]


def host_cost_cases() -> list[Case]:
    """Every configuration at a size at which the host is all that costs, one by one and bound."""
    return [
        Case(spec, direction, 1, implementation, OVERHEAD_NUMEL)
        for spec in all_specs()
        for direction in ("encode", "decode")
        for implementation in (FUSED, BOUND)
    ]


def directions(spec: str, numel: int, dtype: str) -> list[Case]:
    """Encode, decode, decode and merge, and recode, which knows no dtype."""
    of = (("encode", 1), ("decode", 1), ("decode", MERGED_SOURCES), ("recode", MERGED_SOURCES))
    return [
        Case(spec, direction, sources, FUSED, numel, dtype)
        for direction, sources in of
        if direction != "recode" or dtype == "float32"
    ]


def peer_cases() -> list[Case]:
    """Every compressor of :data:`PEERS` beside its reference in plain torch, as it is and compiled."""
    return [
        Case(spec, direction, 1, implementation, PEER_NUMEL)
        for spec in PEERS
        for direction in ("encode", "decode")
        for implementation in (COMPILED, EAGER, FUSED)  # the last one refers to the others
    ]


class Bench:
    """Measures cases one after the other, and writes each row at once."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.card = recorder, Card()
        self._copies_s: dict[int, float] = {}
        self._tensors = functools.lru_cache(maxsize=1)(self._new_tensors)  # cases of one size follow one another

    def run(self, cases: Sequence[Case], budget: Budget) -> None:
        """Measure the cases that there is time for. After one that breaks this process's connection to the GPU, the
        process begins anew with the next one."""
        first = int(os.environ.pop(_FIRST, "0"))
        skipped = 0
        for number, case in enumerate(cases[first:], first):
            if budget.left_s < (PEER_S if case.implementation == COMPILED else CASE_S):
                skipped += 1
            elif is_broken(self.measure(case)):
                sys.stdout.flush()
                os.environ |= {_FIRST: str(number + 1)} | budget.environment()
                os.execv(sys.executable, [sys.executable, *python_arguments(sys.argv[0]), *sys.argv[1:]])
        if skipped:
            budget.left_out.append(f"{skipped} of {len(cases)} cases")

    def measure(self, case: Case) -> str:
        """Add the row of ``case``, with its timing or the reason why there is none, which is returned."""
        note, timing = self.recorder.shortage(case) or "", None
        if not note:
            try:
                timing = self._time(case)
            except Exception as error:  # of whatever kind: the other cases have not failed
                note = "not measured: " + f"{type(error).__name__}: {error}".partition("\n")[0]
        self.recorder.add(case, "", timing, note)
        return note

    def _time(self, case: Case) -> Timing:
        copy_nbytes = _rounded(case.moved_nbytes)
        copy_s = self._copy_s(copy_nbytes)
        sets = self._tensors(case.numel, case.dtype)
        calls = [case.on(tensors) for tensors in sets]
        if case.implementation in (EAGER, COMPILED):
            calls = calls[:1]  # its temporaries exceed the cache, and each call would be compiled
            _check_device(calls[0](), sets[0][0].device)
        host_s = seconds_to_enqueue(calls[0]) if case.numel <= OVERHEAD_NUMEL else None
        found = self.card.time(calls)
        in_l2 = "yes" if self.card.stays_in_l2(case.moved_nbytes, len(calls)) else ""
        columns = {"timing": found.how, "in_l2": in_l2, "sets": str(len(calls))}
        return Timing(found.low_s, found.median_s, found.high_s, copy_s, host_s, copy_nbytes, columns)

    def _new_tensors(self, numel: int, dtype: str) -> list[Tensors]:
        _give_back()
        kind: torch.dtype = getattr(torch, dtype)
        # a decoder touches little more than its output
        number = 1 if numel <= OVERHEAD_NUMEL else self.card.num_sets(kind.itemsize * numel)
        number = max(1, min(number, self.card.free_nbytes // (4 * 12 * numel)))  # payloads and states need room, too
        return [new_tensors(numel, self.card.device, kind) for _ in range(number)]

    def _copy_s(self, nbytes: int) -> float:
        """Seconds that a copy takes that reads and writes ``nbytes``, together; measured once."""
        if nbytes not in self._copies_s:
            self._tensors.cache_clear()
            _give_back()
            number = self.card.num_sets(nbytes)
            pairs = [torch.ones(2, max(1, nbytes // 8), device=self.card.device) for _ in range(number)]
            self._copies_s[nbytes] = self.card.time(
                [lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs]
            ).median_s
            del pairs
            _give_back()
        return self._copies_s[nbytes]


def _rounded(nbytes: int) -> int:
    """About ``nbytes``, at most an eighth more: so that few sizes of copies serve all cases."""
    step = 2 ** max(0, nbytes.bit_length() - 4)
    return max(8, -(-nbytes // step) * step)


def _give_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _check_device(result: Any, device: torch.device) -> None:
    parts = result if isinstance(result, tuple) else (result,)
    if any(isinstance(part, torch.Tensor) and part.device.type != device.type for part in parts):
        raise ValueError(f"the reference returns tensors that are not on {device.type}")


def seconds_to_enqueue(call: Callable[[], Any], calls: int = 100, rounds: int = 7) -> float:
    """Seconds that a call keeps the host busy; so few calls that the stream's queue does not fill and block."""
    call()
    seconds = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        seconds.append((time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return statistics.median(seconds)


def table(rows: Sequence[dict[str, str]]) -> list[str]:
    """A line per configuration: percent of the copy at the size that is needed most, and microseconds of the host."""
    numel = BANDWIDTH_SIZES[0][0]
    columns = {
        "encode": ("encode", "1", "float32"),
        "decode": ("decode", "1", "float32"),
        f"decode {MERGED_SOURCES}": ("decode", str(MERGED_SOURCES), "float32"),
        f"recode {MERGED_SOURCES}": ("recode", str(MERGED_SOURCES), "float32"),
        "enc bf16": ("encode", "1", "bfloat16"),
        "dec bf16": ("decode", "1", "bfloat16"),
    }
    host = {"host enc": FUSED, "bound enc": BOUND}
    lines = [f"{'% of copy, us':<54}" + "".join(f"{name:>10}" for name in (*columns, *host))]
    for spec in sorted({row["compressor"] for row in rows} - {"copy"}):
        mine = [row for row in rows if row["compressor"] == spec]
        large = {
            (row["direction"], row["sources"], row["dtype"]): row["percent_of_copy"]
            for row in mine
            if row["implementation"] == FUSED and row["numel"] == str(numel)
        }
        costs = {
            row["implementation"]: row["host_us_per_call"]
            for row in mine
            if row["numel"] == str(OVERHEAD_NUMEL) and row["direction"] == "encode"
        }
        cells = [*(large.get(key, "") for key in columns.values()), *(costs.get(which, "") for which in host.values())]
        lines.append(f"{spec:<54}" + "".join(f"{cell:>10}" for cell in cells))
    return lines


def factors(rows: Sequence[dict[str, str]]) -> list[str]:
    """Lines that tell how many times as fast as its reference in plain torch each compressor is."""
    lines = []
    for row in rows:
        if row.get("factor_over_compiled") or row["factor_over_eager"]:
            over = (
                f"{row.get('factor_over_compiled') or '?':>8} x compiled {row['factor_over_eager'] or '?':>8} x eager"
            )
            lines.append(f"{row['compressor']:<40}{row['direction']:<8}{over}")
    return lines
