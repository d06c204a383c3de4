"""What the hook costs when it has nothing to save: DDP with ``Identity`` attached, against plain DDP.

    torchrun --standalone --nproc-per-node 2 bench/hook_overhead.py

Four copies of one model take turns within one process: plain DDP, plain DDP again (the A/A arm: what the measurement
cannot tell apart), ``Identity`` reduced in place (``allreduce``), and ``Identity`` encoded, gathered and decoded
(``allgather``). The order alternates, a barrier precedes every step, and what is reported is the median over the rounds
of the ratio to the plain arm of the same round, with the quartiles.
"""

from __future__ import annotations

import os
import statistics
import time

import torch
import torch.distributed as dist
from record import write_csv
from torch.nn.parallel import DistributedDataParallel

import gckernels
from gckernels import sync

ROUNDS, WARM_UP = 60, 5
WIDTH, DEPTH, BATCH = 1024, 7, 64  # 7.3 million parameters


def model(device: torch.device) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(DEPTH)]
    network = torch.nn.Sequential(*layers).to(device)
    return DistributedDataParallel(network, bucket_cap_mb=4)


def step_seconds(ddp: DistributedDataParallel, batch: torch.Tensor) -> float:
    dist.barrier()
    start = time.perf_counter()
    ddp(batch).square().mean().backward()
    if batch.is_cuda:
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    ddp.zero_grad()
    return elapsed


def main() -> None:
    on_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    arms = {name: model(device) for name in ("plain", "plain again", "identity allreduce", "identity allgather")}
    handles = [
        sync.attach(arms["identity allreduce"], gckernels.Identity()),
        sync.attach(arms["identity allgather"], gckernels.Identity(), program=sync.ALLGATHER),
    ]
    batch = torch.randn(BATCH, WIDTH, device=device)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(WARM_UP + ROUNDS):
        for name in list(arms) if round_ % 2 else reversed(arms):
            elapsed = step_seconds(arms[name], batch)
            if round_ >= WARM_UP:
                seconds[name].append(elapsed)
    if dist.get_rank() == 0:
        rows = []
        for name, each in seconds.items():
            ratios = [a / b for a, b in zip(each, seconds["plain"], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            rows.append(
                {
                    "arm": name,
                    "world_size": dist.get_world_size(),
                    "rounds": ROUNDS,
                    "median_s": f"{statistics.median(each):.5f}",
                    "ratio_to_plain": f"{middle:.3f}",
                    "ratio_quartile_1": f"{low:.3f}",
                    "ratio_quartile_3": f"{high:.3f}",
                }
            )
            print(rows[-1])
        write_csv(f"hook_overhead_{dist.get_world_size()}_ranks", device, rows)
    for handle in handles:
        handle.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
