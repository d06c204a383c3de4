"""Sparsifiers against torch.topk: one in a hundred of 25 million elements.

    python bench/topk.py
    python bench/topk.py --device cuda

Ours is a whole encode: gradient plus residual, selection, indices and values in their payload, what was not sent back
in the residual. ``torch.topk`` gets magnitudes that are ready and does nothing but find the largest, unsorted. They
take turns; reported are medians and the median of the ratios. Writes ``bench/results/<device type>/topk.csv``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from record import write_csv

import gckernels

NUMEL, RATIO, ROUNDS = 25_000_000, 0.01, 9
SPECS = ("TopK", "MSTopK", "GradDrop", "DGC", "Threshold(tau=2.575, ratio=0.01)", "ChunkTopK(chunk=1024, k=8)")


def seconds(call: Callable[[], object], device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def compared(spec: str, device: torch.device) -> dict[str, object]:
    compressor = gckernels.from_spec(spec)
    assert isinstance(compressor, gckernels.Compressor)
    grad = torch.randn(NUMEL, device=device)
    residual = torch.zeros(compressor.states * NUMEL, device=device)
    payload = torch.empty(compressor.payload_nbytes(NUMEL), dtype=torch.uint8, device=device)
    magnitudes, k = grad.abs(), int(NUMEL * RATIO)

    def ours() -> None:
        compressor.encode(grad, residual, payload)

    def theirs() -> None:
        torch.topk(magnitudes, k, sorted=False)

    times: dict[Callable[[], None], list[float]] = {ours: [], theirs: []}
    for round_ in range(1 + ROUNDS):
        for call, found in times.items():
            residual.zero_()  # the same work every time
            found.append(seconds(call, device)) if round_ else call()
    ratios = [b / a for a, b in zip(times[ours], times[theirs], strict=True)]
    return {
        "compressor": spec,
        "numel": NUMEL,
        "ratio": RATIO,
        "threads": torch.get_num_threads(),
        "median_s": f"{statistics.median(times[ours]):.5f}",
        "torch_topk_s": f"{statistics.median(times[theirs]):.5f}",
        "times_as_fast": f"{statistics.median(ratios):.1f}",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    device = torch.device(parser.parse_args().device)
    rows = []
    for threads in sorted({1, torch.get_num_threads()}) if device.type == "cpu" else [torch.get_num_threads()]:
        torch.set_num_threads(threads)
        for spec in SPECS:
            rows.append(compared(spec, device))
            print(rows[-1], flush=True)
    write_csv("topk", device, rows)


if __name__ == "__main__":
    main()
