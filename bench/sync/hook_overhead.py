"""The overhead of synchronisation without compression: ``Identity`` against plain DDP.

    torchrun --standalone --nproc-per-node 2 -m bench.sync.hook_overhead

Copies of one model take turns within one process: plain DDP; plain DDP again, which shows the noise floor; DDP with
``Identity`` attached, reduced in place (``allreduce``) or encoded, gathered and decoded (``allgather``); and the same
two with a ``Synchronizer`` instead of DDP. The order alternates, and a barrier precedes every step. The results are
median and quartiles, over the rounds, of the ratio to plain DDP in the same round.
"""

from __future__ import annotations

import functools
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gckernels
from bench.lib.models import WIDTH, mlp
from bench.lib.record import write_csv
from bench.lib.rounds import ratio_columns, take_turns
from gckernels import sync

ROUNDS, WARM_UP = 60, 5
BATCH = 64
BUCKET_CAP_MB = 4


def step_seconds(model: torch.nn.Module, batch: torch.Tensor) -> float:
    start = time.perf_counter()
    model(batch).square().mean().backward()
    if batch.is_cuda:
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    model.zero_grad()
    return elapsed


def main() -> None:
    on_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    arms: dict[str, torch.nn.Module] = {}
    handles: list[sync.Attachment | sync.Synchronizer] = []
    for name in ("plain", "plain again"):
        arms[name] = DistributedDataParallel(mlp().to(device), bucket_cap_mb=BUCKET_CAP_MB)
    for name, program in (("allreduce", sync.ALLREDUCE), ("allgather", sync.ALLGATHER)):
        arms[f"identity {name}"] = hooked = DistributedDataParallel(mlp().to(device), bucket_cap_mb=BUCKET_CAP_MB)
        handles.append(sync.attach(hooked, sync.plan(hooked, gckernels.Identity(), program=program)))
        arms[f"synchronizer {name}"] = alone = mlp().to(device)
        handles.append(
            sync.Synchronizer(
                alone, sync.plan(alone, gckernels.Identity(), program=program), bucket_cap_mb=BUCKET_CAP_MB
            )
        )
    batch = torch.randn(BATCH, WIDTH, device=device)
    steps = {name: functools.partial(step_seconds, model, batch) for name, model in arms.items()}
    seconds = take_turns(steps, ROUNDS, WARM_UP)
    if dist.get_rank() == 0:
        rows = []
        for name, each in seconds.items():
            rows.append(
                {
                    "arm": name,
                    "world_size": dist.get_world_size(),
                    "rounds": ROUNDS,
                    "median_s": f"{statistics.median(each):.5f}",
                    **ratio_columns(each, seconds["plain"], "ratio_to_plain"),
                }
            )
            print(rows[-1])
        write_csv(f"hook_overhead_{dist.get_world_size()}_ranks", device, rows)
    for handle in handles:
        handle.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
