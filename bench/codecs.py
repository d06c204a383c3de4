"""Throughput of encode and decode, against the copy bandwidth of the same run.

    python bench/codecs.py                   # host path
    python bench/codecs.py --device cuda     # kernels

For every compressor: ``encode`` with feedback (without, for compressors that need none) and ``decode`` of one payload.
The rate counts the fewest bytes that must move (gradient and residual read, residual and payload written; payload read,
gradient written); the copy counts its reads and writes. Host timings take the medians of interleaved rounds, so that a
machine whose speed drifts slows all of them; with a GPU, ``triton.testing.do_bench``.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import triton.testing
from record import write_csv

import gckernels

SPECS = (
    "Identity",
    "Cast16",
    "EFSignSGD",
    "EFSignSGD(block=1024)",
    "BlockQuant",
    "BlockQuant(bits=4)",
    "ChunkTopK",
)
HOST_NUMEL = (2**20, 2**24)
CUDA_NUMEL = (2**20, 2**24, 2**28)
ROUNDS = 7


def cases(numel: int, device: torch.device) -> dict[tuple[str, str], tuple[int, Callable[[], None]]]:
    """``(compressor, direction) -> (fewest bytes, call)``; the copy is among them."""
    grad, residual = torch.randn(numel, device=device), torch.zeros(numel, device=device)
    out = torch.empty_like(grad)
    calls: dict[tuple[str, str], tuple[int, Callable[[], None]]] = {
        ("copy", "copy"): (8 * numel, lambda: out.copy_(grad)),  # type: ignore[dict-item,return-value]
    }
    for spec in SPECS:
        compressor = gckernels.from_spec(spec)
        nbytes = compressor.payload_nbytes(numel)
        payload = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        kept = residual if compressor.needs_feedback else None

        def encode(compressor=compressor, kept=kept, payload=payload) -> None:
            compressor.encode(grad, kept, payload)

        def decode(compressor=compressor, payload=payload) -> None:
            compressor.decode(payload, out)

        encode()
        calls[spec, "encode"] = (4 * numel + (8 * numel if kept is not None else 0) + nbytes, encode)
        calls[spec, "decode"] = (4 * numel + nbytes, decode)
    return calls


def median_seconds(calls: list[Callable[[], None]], device: torch.device) -> list[float]:
    """Median seconds of each call."""
    if device.type == "cuda":
        return [triton.testing.do_bench(call, return_mode="median") / 1e3 for call in calls]
    seconds: list[list[float]] = [[] for _ in calls]
    for round_ in range(ROUNDS + 1):  # the first one warms up
        for index, call in enumerate(calls):
            start = time.perf_counter()
            call()
            if round_:
                seconds[index].append(time.perf_counter() - start)
    return [statistics.median(each) for each in seconds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    device = torch.device(parser.parse_args().device)
    rows = []
    for numel in CUDA_NUMEL if device.type == "cuda" else HOST_NUMEL:
        measured = cases(numel, device)
        seconds = median_seconds([call for _, call in measured.values()], device)
        copy_rate = 8 * numel / seconds[0]
        for ((spec, direction), (nbytes, _)), each in zip(measured.items(), seconds, strict=True):
            rows.append(
                {
                    "compressor": spec,
                    "direction": direction,
                    "numel": numel,
                    "threads": torch.get_num_threads() if device.type == "cpu" else "",
                    "median_s": f"{each:.6g}",
                    "gb_per_s": f"{nbytes / each / 1e9:.2f}",
                    "percent_of_copy": f"{100 * nbytes / each / copy_rate:.1f}",
                }
            )
            line = "{compressor:<24}{direction:<8}{numel:>11}{gb_per_s:>10} GB/s{percent_of_copy:>8} %"
            print(line.format(**rows[-1]))
    print("written:", write_csv("codecs", device, rows).name)


if __name__ == "__main__":
    main()
