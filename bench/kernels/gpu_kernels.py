"""Measurement of the kernels on a GPU: the cases of ``lib/cases.py``, each beside a copy of as many bytes.

Calls are timed as CUDA graphs that cycle through sets of tensors, so that no call finds its tensors in the L2 cache.
Rows whose tensors fit the cache anyway are marked ``in_l2``. Calls that cannot be captured as a graph have ``stream``
in the column ``timing``; their time may include the host's.
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
from bench.lib.cases import (
    BOUND,
    COMPILED,
    EAGER,
    EIGHT_BITS,
    FUSED,
    TORCH,
    Case,
    Tensors,
    all_specs,
    directions,
    new_tensors,
)
from bench.lib.faults import is_broken
from bench.lib.peers import PEERS
from bench.lib.program import python_arguments
from bench.lib.timings import OVERHEAD_NUMEL, Recorder, Timing

MERGED_SOURCES = 8
BANDWIDTH_SIZES = ((2**26, "float32"), (2**24, "float32"), (2**26, "bfloat16"), (2**24, "bfloat16"))
"""Sizes in elements and dtypes at which all configurations are measured, the most important first."""
LARGE_NUMEL = 2**28
LARGE_SPECS = ("EFSignSGD", "BlockQuant", "TernGrad", "TopK")
EIGHT_BIT_SPECS = ("BlockQuant(bits=4)", "EFSignSGD")
PEER_NUMEL = 2**24
REFERENCES = ("BlockQuant", "EFSignSGD", "BlockQuant(bits=4)", "Cast16", "BlockFP8", "TernGrad", "QSGD", "OneBit")
"""Compressors that are compared with their compiled references, the most important first."""
_FIRST = "BENCH_FIRST_CASE"  # environment variable with the number of the first case to measure
CASE_S, PEER_S = 2.0, 15.0  # no case, or case that is compiled, is started with fewer seconds left


def bandwidth_cases() -> list[Case]:
    """Cases of every configuration at sizes limited by bandwidth, with both dtypes, and at one limited by the host."""
    cases = []
    for numel, dtype in BANDWIDTH_SIZES:
        cases += [Case("copy", "copy", 1, TORCH, numel)] if dtype == "float32" else []
        cases += [case for spec in all_specs() for case in directions(spec, numel, dtype, MERGED_SOURCES)]
        cases += [Case(spec, "encode", 1, EIGHT_BITS, numel, dtype) for spec in EIGHT_BIT_SPECS]
        if (numel, dtype) == BANDWIDTH_SIZES[0]:
            cases += host_cost_cases()
    return cases + [case for spec in LARGE_SPECS for case in directions(spec, LARGE_NUMEL, "float32", MERGED_SOURCES)]


def host_cost_cases() -> list[Case]:
    """Cases of every configuration, one by one and bound, at a size at which only the host's time matters."""
    return [
        Case(spec, direction, 1, implementation, OVERHEAD_NUMEL)
        for spec in all_specs()
        for direction in ("encode", "decode")
        for implementation in (FUSED, BOUND)
    ]


def peer_cases() -> list[Case]:
    """Cases of every compressor of :data:`REFERENCES`, of its reference in plain torch, eager and compiled, and of the
    quantisers of other packages."""
    others = [
        Case(peer.spec, direction, 1, name, PEER_NUMEL)
        for name, peer in PEERS.items()
        for direction in ("encode", "decode")
    ]
    return others + [
        Case(spec, direction, 1, implementation, PEER_NUMEL)
        for spec in REFERENCES
        for direction in ("encode", "decode")
        for implementation in (COMPILED, EAGER, FUSED)  # the row of the last has factors over the others
    ]


class Bench:
    """Measures cases one after the other and writes each row immediately."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.card = recorder, Card()
        self._copies_s: dict[int, float] = {}
        self._tensors = functools.lru_cache(maxsize=1)(self._new_tensors)  # cases of one size are consecutive

    def run(self, cases: Sequence[Case], budget: Budget) -> None:
        """Measure as many cases as the budget allows.

        After a case that breaks this process's connection to the GPU, the process restarts itself with the next case.
        """
        first = int(os.environ.pop(_FIRST, "0"))
        skipped = 0
        for number, case in enumerate(cases[first:], first):
            if budget.left_s < (PEER_S if case.implementation in (COMPILED, *PEERS) else CASE_S):
                skipped += 1
            elif is_broken(self.recorder.measure(case, "", functools.partial(self._time, case))):
                sys.stdout.flush()
                os.environ |= {_FIRST: str(number + 1)} | budget.environment()
                os.execv(sys.executable, [sys.executable, *python_arguments(sys.argv[0]), *sys.argv[1:]])
        if skipped:
            budget.left_out.append(f"{skipped} of {len(cases)} cases")

    def _time(self, case: Case) -> Timing:
        copy_nbytes = _rounded(case.moved_nbytes)
        copy_s = self._copy_s(copy_nbytes)
        sets = self._tensors(case.numel, case.dtype)
        calls = [case.on(tensors) for tensors in sets]
        if case.implementation in (EAGER, COMPILED, *PEERS):
            calls = calls[:1]  # its temporaries exceed the cache, and each further call would be compiled
            _check_device(calls[0](), sets[0][0].device)
        host_s = seconds_to_enqueue(calls[0]) if case.numel <= OVERHEAD_NUMEL else None
        quartiles = self.card.time(calls)
        in_l2 = "yes" if self.card.stays_in_l2(case.moved_nbytes, len(calls)) else ""
        columns = {"timing": quartiles.how, "in_l2": in_l2, "sets": str(len(calls))}
        return Timing(quartiles.low_s, quartiles.median_s, quartiles.high_s, copy_s, copy_nbytes, host_s, columns)

    def _new_tensors(self, numel: int, dtype: str) -> list[Tensors]:
        _give_back()
        kind: torch.dtype = getattr(torch, dtype)
        # a decoder reads and writes little more than its output
        number = 1 if numel <= OVERHEAD_NUMEL else self.card.num_sets(kind.itemsize * numel)
        number = max(1, min(number, self.card.free_nbytes // (4 * 12 * numel)))  # leaves room for payloads and states
        return [new_tensors(numel, self.card.device, kind) for _ in range(number)]

    def _copy_s(self, nbytes: int) -> float:
        """Seconds of a copy that reads and writes ``nbytes`` in total; measured once per size."""
        if nbytes not in self._copies_s:
            self._tensors.cache_clear()
            _give_back()
            number = self.card.num_sets(nbytes)
            pairs = [torch.ones(2, max(1, nbytes // 8), device=self.card.device) for _ in range(number)]
            self._copies_s[nbytes] = self.card.time(
                [functools.partial(pair[1].copy_, pair[0]) for pair in pairs]
            ).median_s
            del pairs
            _give_back()
        return self._copies_s[nbytes]


def _rounded(nbytes: int) -> int:
    """``nbytes`` rounded up by at most an eighth, so that few sizes of copies serve all cases."""
    step = 2 ** max(0, nbytes.bit_length() - 4)
    return max(8, -(-nbytes // step) * step)


def _give_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _check_device(result: Any, device: torch.device) -> None:
    parts = result if isinstance(result, tuple) else (result,)
    if any(isinstance(part, torch.Tensor) and part.device.type != device.type for part in parts):
        raise ValueError(f"the reference returns tensors on another device than {device.type}")


def seconds_to_enqueue(call: Callable[[], Any], calls: int = 100, rounds: int = 7) -> float:
    """Seconds for which a call keeps the host busy; ``calls`` is small, so that the stream's queue never blocks."""
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
    """Lines of a table by configuration: percent of the copy at the largest common size, and host time in us."""
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
    """Lines of text with the speedup of each compressor over its reference in plain torch."""
    lines = []
    for row in rows:
        if row.get("factor_over_compiled") or row["factor_over_eager"]:
            over = (
                f"{row.get('factor_over_compiled') or '?':>8} x compiled {row['factor_over_eager'] or '?':>8} x eager"
            )
            lines.append(f"{row['compressor']:<40}{row['direction']:<8}{over}")
    return lines
