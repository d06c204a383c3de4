"""The overhead of synchronisation without compression, against plain DDP.

    torchrun --standalone --nproc-per-node 2 -m bench.sync.hook_overhead

Copies of one model take turns within one process. The order alternates, and a barrier precedes every step. The results
are medians and quartiles, over the rounds, of the ratios to plain DDP in the same round: of the step's time, and of the
CPU time of the process, all threads together. The arms:

- ``plain`` and ``plain again``: DDP alone. The second shows the noise floor.
- ``torch's hook``: DDP with ``allreduce_hook`` of torch.
- ``identity allreduce``: an attachment whose plan compresses nothing, and so needs no hook.
- ``dense buckets``: an attachment that compresses from a step on that never comes. Until then every bucket is averaged
  in place by its hook.
- ``closed``: an attachment that has compressed, and was closed.
- ``identity allgather``: an attachment that encodes, gathers and decodes every gradient, exactly.
- ``module allreduce``, ``module allgather``: a bare module instead of DDP, with the plans of the arms
  of these names.
"""

from __future__ import annotations

import functools
import os
import statistics
import time

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import gckernels
from bench.lib.models import WIDTH, mlp
from bench.lib.record import write_csv
from bench.lib.rounds import ratio_columns, take_turns
from gckernels import sync

ROUNDS, WARM_UP = 60, 5
BATCH = 64
BUCKET_CAP_MB = 4
NEVER = 10**9


def step_seconds(model: torch.nn.Module, batch: torch.Tensor) -> tuple[float, float]:
    """Train one step; returns its seconds, and the CPU seconds of all threads of this process meanwhile."""
    start, start_cpu = time.perf_counter(), time.process_time()
    loss: torch.Tensor = model(batch).square().mean()
    loss.backward()
    if batch.is_cuda:
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - start, time.process_time() - start_cpu
    model.zero_grad()
    return elapsed


class Arms:
    """The models by arm.

    Args:
        device: the device of the models.
        batch: ``[batch, width]``, their input.
    """

    def __init__(self, device: torch.device, batch: torch.Tensor) -> None:
        self._device = device
        self._handles: list[sync.Attachment] = []
        self.models: dict[str, torch.nn.Module] = {name: self._wrapped() for name in ("plain", "plain again")}
        self.models["torch's hook"] = hooked = self._wrapped()
        hooked.register_comm_hook(None, allreduce_hook)
        self.models["dense buckets"] = self._attached("EFSignSGD", None, NEVER)
        self.models["closed"] = closed = self._attached("EFSignSGD", None)
        for _ in range(3):
            step_seconds(closed, batch)
        self._handles.pop().close()
        for name, program in (("allreduce", sync.programs.ALLREDUCE), ("allgather", sync.programs.ALLGATHER)):
            self.models[f"identity {name}"] = self._attached("Identity", program)
            self.models[f"module {name}"] = alone = mlp().to(device)
            plan = sync.uniform_plan(alone, gckernels.Identity(), program=program)
            self._handles.append(sync.attach(alone, plan, bucket_cap_mb=BUCKET_CAP_MB))

    def _wrapped(self) -> DistributedDataParallel:
        return DistributedDataParallel(mlp().to(self._device), bucket_cap_mb=BUCKET_CAP_MB)

    def _attached(
        self, spec: str, program: sync.programs.Program | None, start_step: int = 0
    ) -> DistributedDataParallel:
        model = self._wrapped()
        plan = sync.uniform_plan(model, gckernels.from_spec(spec), program=program)
        self._handles.append(sync.attach(model, plan, start_step=start_step))
        return model

    def close(self) -> None:
        """End all attachments."""
        for handle in self._handles:
            handle.close()


def main() -> None:
    on_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    batch = torch.randn(BATCH, WIDTH, device=device)
    arms = Arms(device, batch)
    steps = {name: functools.partial(step_seconds, model, batch) for name, model in arms.models.items()}
    results = take_turns(steps, ROUNDS, WARM_UP)
    if dist.get_rank() == 0:
        plain_s, plain_cpu_s = zip(*results["plain"], strict=True)
        rows = []
        for name, each in results.items():
            seconds, cpu_seconds = zip(*each, strict=True)
            row = {"arm": name, "world_size": dist.get_world_size(), "rounds": ROUNDS}
            row |= {"median_s": f"{statistics.median(seconds):.5f}"}
            row |= ratio_columns(seconds, plain_s, "ratio_to_plain")
            row |= {"median_cpu_s": f"{statistics.median(cpu_seconds):.5f}"}
            ratios = ratio_columns(cpu_seconds, plain_cpu_s, "ratio_to_plain")
            rows.append(row | {f"cpu_{column}": value for column, value in ratios.items()})
            print(rows[-1])
        write_csv(f"hook_overhead_{dist.get_world_size()}_ranks", device, rows)
    arms.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
