"""PowerSGD against its bare matrix products and memory traffic.

    python -m bench.kernels.powersgd
    python -m bench.kernels.powersgd --device cuda

The stages of a step, including feedback and orthonormal bases, take turns with ``torch.mm`` for the three products of
the same matrices, and with the memory traffic of feedback: gradient and residual are read twice, then read and written.
The results are medians, and medians of the ratios to the products and to the larger of the two.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

import torch

from bench.lib.rounds import seconds
from bench.lib.sweep import Row, Sweep
from gckernels.ops.powersgd import ops as powersgd_ops

ROUNDS = 15
SHAPES = ((1024, 1024), (512, 4608), (4096, 4096))
RANKS = (1, 2, 4, 8, 16, 32)
GPU_RANKS = (4, 1, 32)  # fewer, because the time budget on a GPU is short


def steady_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call after 10 ms of the same calls.

    OpenMP's threads spin for a while after ``torch.mm``, on cores that the threads of gckernels need.
    """
    until = time.perf_counter() + 0.01
    while time.perf_counter() < until:
        seconds(call, device)
    return seconds(call, device)


def stages(rows: int, cols: int, rank: int, device: torch.device) -> list[Row]:
    """A row of the table: PowerSGD's stages on one matrix."""
    grad, residual = torch.randn(rows * cols, device=device), torch.zeros(rows * cols, device=device)
    left, right = torch.empty(rank, rows, device=device), torch.randn(rank, cols, device=device)
    matrix, p, q = grad.view(rows, cols).clone(), torch.randn(rows, rank, device=device), right.T.contiguous()
    new_p, new_q = torch.empty_like(p), torch.empty_like(q)

    added = torch.zeros(1, dtype=torch.int64, device=device)
    begin, finish_left = powersgd_ops.bind_orthogonalise([right], [1], added), powersgd_ops.bind_orthogonalise([left])
    project_left = powersgd_ops.bind_left([grad], [residual], [right], [left])
    project_right = powersgd_ops.bind_right([grad], [residual], [left], [right])
    reconstruct = powersgd_ops.bind_reconstruct([left], [right], [grad], [residual])

    def ours() -> None:
        begin()
        project_left()
        finish_left()
        project_right()
        reconstruct()

    def products() -> None:
        torch.mm(matrix, q, out=new_p)
        torch.mm(matrix.T, p, out=new_q)
        torch.mm(p, q.T, out=matrix)

    def moves() -> None:
        torch.dot(grad, residual)
        torch.dot(grad, residual)
        grad.mul_(1.0)
        residual.mul_(1.0)

    calls = (ours, products, moves)
    for call in calls:
        call()
    rounds = [[steady_seconds(call, device) for call in calls] for _ in range(ROUNDS)]
    ours_s, products_s, moves_s = map(statistics.median, zip(*rounds, strict=True))
    row: Row = {"rows": rows, "cols": cols, "rank": rank, "threads": torch.get_num_threads()}
    row |= {"median_s": f"{ours_s:.6f}", "products_s": f"{products_s:.6f}", "moves_s": f"{moves_s:.6f}"}
    row["ratio"] = f"{statistics.median(a / b for a, b, _ in rounds):.2f}"
    return [row | {"ratio_to_larger": f"{statistics.median(a / max(b, c) for a, b, c in rounds):.2f}"}]


def cases(device: torch.device) -> dict[str, Callable[[], list[Row]]]:
    """The stages of all ranks and shapes, by name."""
    torch.backends.cuda.matmul.allow_tf32 = False  # the same precision as gckernels
    return {
        f"{rows} x {cols}, rank {rank}": functools.partial(stages, rows, cols, rank, device)
        for rank in (GPU_RANKS if device.type == "cuda" else RANKS)
        for rows, cols in SHAPES
    }


SWEEP = Sweep("powersgd", ("rows", "cols", "rank", "threads"), cases, case_s=5.0)

if __name__ == "__main__":
    SWEEP.main(__doc__)
