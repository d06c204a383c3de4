"""The cost of a step over all units of ResNet-50: one by one through the ops, against bound batches.

    python -m bench.kernels.batch
    python -m bench.kernels.batch --device cuda

A step encodes, with feedback where the compressor needs it, and decodes 161 units of the sizes of ResNet-50's
parameters, 25.6 million elements. A second measurement covers only the 109 units with fewer than 16384 elements, which
have a quarter of a percent of the elements. Both variants take turns within one process. The results are medians over
the rounds and the median of the ratios. ``median_host_s`` is the time for which the calling thread is busy, on a GPU
without waiting for the device; ``median_s`` is the time until all work is done. Writes
``bench/results/<device type>/batch.csv``.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

import gckernels
from bench.lib import resnet50
from bench.lib.rounds import take_turns
from bench.lib.sweep import Row, Sweep
from gckernels.batch import bind_decodes, bind_encodes
from gckernels.codec import Decoding, Encoding

SPECS = ("BlockQuant", "EFSignSGD", "TernGrad", "Identity", "TopK")
ROUNDS, WARM_UP = 25, 3
SMALL = 2**14
SETS = {"all": 2**30, "small": SMALL}


@dataclass(frozen=True)
class Times:
    """Seconds of one step: while the host is busy, and until all work is done."""

    host_s: float
    all_s: float


def timed(step: Callable[[], None], device: torch.device) -> Times:
    """The times of one call of ``step``."""
    start = time.perf_counter()
    step()
    host = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return Times(host - start, time.perf_counter() - start)


def arms(compressor: gckernels.Codec, sizes: list[int], device: torch.device) -> dict[str, Callable[[], None]]:
    """Functions by name that make a step one by one and bound, each on separate tensors."""

    def units() -> tuple[list[Encoding], list[Decoding]]:
        encodings, decodings = [], []
        for numel in sizes:
            grad = torch.randn(numel, device=device)
            residual = (
                torch.zeros(compressor.traits.states * numel, device=device)
                if compressor.traits.needs_feedback
                else None
            )
            payload = torch.empty(compressor.payload_nbytes(numel), dtype=torch.uint8, device=device)
            encodings.append(Encoding(compressor, grad, residual, payload, numel))
            decodings.append(Decoding(compressor, payload, torch.empty_like(grad)))
        return encodings, decodings

    encodings, decodings = units()

    def one_by_one() -> None:
        for unit in encodings:
            compressor.encode(unit.grad, unit.residual, unit.payload, unit.seed)
        for each in decodings:
            compressor.decode(each.payloads, each.out)

    bound_encodings, bound_decodings = units()
    encode, decode = bind_encodes(bound_encodings), bind_decodes(bound_decodings)

    def bound() -> None:
        encode()
        decode()

    return {"one by one": one_by_one, "bound": bound}


def compared(spec: str, units: str, device: torch.device) -> list[Row]:
    """A row of results per variant, for one compressor and the set of units named ``units``."""
    compressor = gckernels.from_spec(spec)
    assert isinstance(compressor, gckernels.Codec)
    sizes = [numel for numel in resnet50.sizes() if numel < SETS[units]]
    steps = {name: functools.partial(timed, step, device) for name, step in arms(compressor, sizes, device).items()}
    times_by_arm = take_turns(steps, ROUNDS, WARM_UP)
    rows: list[Row] = []
    for name, each in times_by_arm.items():
        pairs = list(zip(times_by_arm["one by one"], each, strict=True))
        rows.append(
            {
                "compressor": spec,
                "units": units,
                "arm": name,
                "number": len(sizes),
                "numel": sum(sizes),
                "threads": torch.get_num_threads(),
                "rounds": ROUNDS,
                "median_host_s": f"{statistics.median(times.host_s for times in each):.6f}",
                "median_s": f"{statistics.median(times.all_s for times in each):.6f}",
                "times_as_fast_host": f"{statistics.median(a.host_s / b.host_s for a, b in pairs):.2f}",
                "times_as_fast": f"{statistics.median(a.all_s / b.all_s for a, b in pairs):.2f}",
            }
        )
    return rows


def cases(device: torch.device) -> dict[str, Callable[[], list[Row]]]:
    """The comparisons of all compressors and sets of units, by name."""
    return {
        f"{spec} {units}": functools.partial(compared, spec, units, device)
        for spec, units in itertools.product(SPECS, SETS)
    }


SWEEP = Sweep("batch", ("compressor", "units", "arm", "threads"), cases, case_s=5.0)

if __name__ == "__main__":
    SWEEP.main(__doc__)
