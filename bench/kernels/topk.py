"""Sparsifiers against ``torch.topk``, selecting one percent of 25 million elements.

    python -m bench.kernels.topk
    python -m bench.kernels.topk --device cuda

A sparsifier does a whole encode: it adds gradient and residual, selects, writes indices and values into the payload,
and puts the rest back into the residual. ``torch.topk`` gets precomputed magnitudes and only finds the largest,
unsorted. Both take turns; the results are medians and the median of the ratios. On a GPU both are CUDA graphs, timed by
events after the residual has been zeroed and the L2 cache flushed. Writes ``bench/results/<device type>/topk.csv``.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

import gckernels
from bench.lib.card import Card
from bench.lib.rounds import seconds
from bench.lib.sweep import Row, Sweep

NUMEL, RATIO, ROUNDS = 25_000_000, 0.01, 9
SPECS = ("TopK", "MSTopK", "GradDrop", "DGC", "Threshold(tau=2.575, ratio=0.01)", "ChunkTopK(chunk=1024, k=8)")

Call = Callable[[], object]


def timed_on_host(calls: Sequence[Call], before: Call) -> list[Callable[[], float]]:
    """For each of ``calls``, a function that calls ``before``, then the call, and returns the seconds of the latter."""

    def timed(call: Call) -> float:
        before()
        return seconds(call)

    return [functools.partial(timed, call) for call in calls]


def timed_on_gpu(calls: Sequence[Call], before: Call) -> list[Callable[[], float]]:
    """Like :func:`timed_on_host`, with CUDA graphs timed by the GPU, so that the host's time is not included."""
    card = Card()

    def ready() -> None:
        before()
        card.clean_l2()

    def timed(work: Any) -> float:
        return card.seconds(work, 1, ready)[0]

    return [functools.partial(timed, card.repeated([call])[0]) for call in calls]


def compared(spec: str, device: torch.device) -> list[Row]:
    """A row of the table: one sparsifier against ``torch.topk``."""
    compressor = gckernels.from_spec(spec)
    assert isinstance(compressor, gckernels.Codec)
    grad = torch.randn(NUMEL, device=device)
    residual = torch.zeros(compressor.traits.states * NUMEL, device=device)
    payload = torch.empty(compressor.payload_nbytes(NUMEL), dtype=torch.uint8, device=device)
    magnitudes, k = grad.abs(), int(NUMEL * RATIO)

    def ours() -> None:
        compressor.encode(grad, residual, payload)

    def theirs() -> None:
        torch.topk(magnitudes, k, sorted=False)

    timed = timed_on_gpu if device.type == "cuda" else timed_on_host
    clocks = timed((ours, theirs), residual.zero_)  # the same work every time
    rounds = [[clock() for clock in clocks] for _ in range(1 + ROUNDS)][1:]
    ours_s, theirs_s = map(statistics.median, zip(*rounds, strict=True))
    row = {"compressor": spec, "numel": NUMEL, "ratio": RATIO, "threads": torch.get_num_threads()}
    row |= {"median_s": f"{ours_s:.6f}", "torch_topk_s": f"{theirs_s:.6f}"}
    return [row | {"times_as_fast": f"{statistics.median(b / a for a, b in rounds):.2f}"}]


def cases(device: torch.device) -> dict[str, Callable[[], list[Row]]]:
    """The comparisons of all sparsifiers, by name."""
    return {spec: functools.partial(compared, spec, device) for spec in SPECS}


SWEEP = Sweep("topk", ("compressor", "numel", "threads"), cases, case_s=2.0)

if __name__ == "__main__":
    SWEEP.main(__doc__)
