"""PowerSGD against its bare matrix products and memory traffic, and against PyTorch's hook.

    python -m bench.kernels.powersgd
    torchrun --standalone --nproc-per-node 2 -m bench.kernels.powersgd

The first command measures the stages of a step, including feedback and orthonormal bases. They take turns with
``torch.mm`` for the three products of the same matrices, and with the memory traffic of feedback: gradient and residual
are read twice, then read and written. The results are medians, and medians of the ratios to the products and to the
larger of the two. The second command measures training steps of one model with PyTorch's hook (with a single bucket,
the only one that works on Gloo) and with gckernels.
"""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from bench.lib.budget import Budget
from bench.lib.record import merge_csv, write_csv
from gckernels import PowerSGD, sync
from gckernels.ops.powersgd import ops as powersgd_ops

ROUNDS = 15
SHAPES = ((1024, 1024), (512, 4608), (4096, 4096))
RANKS = (1, 2, 4, 8, 16, 32)
GPU_RANKS = (4, 1, 32)  # fewer, because the time budget on a GPU is short
KEY = ("rows", "cols", "rank", "threads")


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds until the work of one call is done."""
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def steady_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call after 10 ms of the same calls.

    OpenMP's threads spin for a while after ``torch.mm``, on cores that the threads of gckernels need.
    """
    until = time.perf_counter() + 0.01
    while time.perf_counter() < until:
        seconds(call, device)
    return seconds(call, device)


def stages(rows: int, cols: int, rank: int, device: torch.device) -> dict[str, object]:
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
    return {
        "rows": rows,
        "cols": cols,
        "rank": rank,
        "threads": torch.get_num_threads(),
        "median_s": f"{ours_s:.6f}",
        "products_s": f"{products_s:.6f}",
        "moves_s": f"{moves_s:.6f}",
        "ratio": f"{statistics.median(a / b for a, b, _ in rounds):.2f}",
        "ratio_to_larger": f"{statistics.median(a / max(b, c) for a, b, c in rounds):.2f}",
    }


def _backward(model: DistributedDataParallel, batch: torch.Tensor) -> None:
    model(batch).square().mean().backward()


def steps(rank: int, device: torch.device) -> list[dict[str, object]]:
    """Measure training steps; returns a row per variant."""
    arms: dict[str, DistributedDataParallel] = {}
    for name in ("hook", "ours"):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(1024, 1024) for _ in range(6)]
        arms[name] = DistributedDataParallel(torch.nn.Sequential(*layers).to(device), bucket_cap_mb=100)
    state = powerSGD_hook.PowerSGDState(None, rank, start_powerSGD_iter=2, min_compression_rate=1)
    arms["hook"].register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    attachment = sync.attach(arms["ours"], PowerSGD(rank=rank), start_step=2)
    batch = torch.randn(16, 1024, device=device)
    seconds_by_arm: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(4 + 2 * ROUNDS):
        for name, model in arms.items():
            dist.barrier()
            elapsed = seconds(functools.partial(_backward, model, batch), device)
            if round_ >= 4:
                seconds_by_arm[name].append(elapsed)
            model.zero_grad()
    attachment.close()
    return [
        {"arm": name, "rank": rank, "median_s": f"{statistics.median(each):.5f}"}
        for name, each in seconds_by_arm.items()
    ]


def measure(device: torch.device, budget: Budget) -> list[dict[str, object]]:
    """Measure all shapes and ranks, writing every row immediately; returns the rows."""
    torch.backends.cuda.matmul.allow_tf32 = False  # the same precision as gckernels
    rows = []
    gpu = device.type == "cuda"
    for threads in [torch.get_num_threads()] if gpu else sorted({1, torch.get_num_threads()}):
        torch.set_num_threads(threads)
        for rank in GPU_RANKS if gpu else RANKS:
            for shape in SHAPES:
                if budget.allows(f"{shape[0]} x {shape[1]}, rank {rank}", 5.0):
                    rows.append(stages(*shape, rank, device))
                    merge_csv("powersgd", device, rows[-1:], KEY)
                    print(rows[-1], flush=True)
    return rows


def main() -> None:
    device = (
        torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if torch.cuda.is_available() else torch.device("cpu")
    )
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        rows = [row for rank in (1, 4, 16) for row in steps(rank, device)]
        if dist.get_rank() == 0:
            print(*rows, sep="\n")
            write_csv("powersgd_steps", device, rows)
        dist.destroy_process_group()
    else:
        measure(device, Budget.of_this_process())


if __name__ == "__main__":
    main()
