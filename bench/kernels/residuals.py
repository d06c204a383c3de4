"""Encoding with residuals in 8 bits beside encoding with fp32 residuals, and the same again beside itself.

    python -m bench.kernels.residuals     # writes bench/results/cpu/residuals.csv; a minute, on a quiet machine

Every round times all arms of a compressor, one after the other. ``ratio`` is that of the median to the median with
fp32 residuals; ``again`` is a second arm with these, which shows the noise. ``moved_nbytes`` are the least bytes of an
element that must be read and written.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

import gckernels
from bench.lib.program import program_parser
from bench.lib.record import write_csv
from bench.lib.rounds import CPU, markdown, seconds, take_turns
from gckernels import Codec

SPECS = ("BlockQuant(bits=4)", "BlockQuant", "EFSignSGD", "EFSignSGD(block=None)", "OneBit")
NUMEL = 2**24
FP32, AGAIN, ENCODED = "fp32", "fp32, again", "8 bits"
ROUNDS = 21


def _arms(spec: str, device: torch.device) -> dict[str, tuple[Callable[[], float], float]]:
    """For every arm the function that times a call, and the least bytes of an element that move."""
    compressor = gckernels.from_spec(spec)
    assert isinstance(compressor, Codec)
    grad = torch.randn(NUMEL, dtype=torch.float32, device=device)
    payload = torch.empty(compressor.payload_nbytes(NUMEL), dtype=torch.uint8, device=device)
    encoded = torch.zeros(gckernels.residual_nbytes(NUMEL), dtype=torch.uint8, device=device)
    residuals = {FP32: torch.zeros_like(grad), AGAIN: torch.zeros_like(grad), ENCODED: encoded}

    def timed(residual: torch.Tensor) -> Callable[[], float]:
        return lambda: seconds(lambda: compressor.encode(grad, residual, payload), device)

    return {
        name: (timed(each), (grad.nbytes + payload.nbytes + 2 * each.nbytes) / NUMEL)
        for name, each in residuals.items()
    }


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--device", type=torch.device, default=CPU)
    device = parser.parse_args().device
    rows = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for spec in SPECS:
            arms = _arms(spec, device)
            measured = take_turns({name: timed for name, (timed, _) in arms.items()}, ROUNDS, 2)
            medians = {name: statistics.median(values) for name, values in measured.items()}
            for name, (_, moved) in arms.items():
                row = {"threads": threads, "compressor": spec, "residual": name, "ms": f"{1e3 * medians[name]:.3f}"}
                rows.append(row | {"ratio": f"{medians[name] / medians[FP32]:.3f}", "moved_nbytes": f"{moved:.2f}"})
    write_csv("residuals", device, rows)
    print(markdown(rows, list(rows[0])))


if __name__ == "__main__":
    main()
