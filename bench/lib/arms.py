"""Arms of measurements: copies of a DDP model that differ in the way in which their gradients are averaged.

An arm has a compressor, a plan, a plan that is chosen while it trains, one of PyTorch's communication hooks, or none of
them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import gckernels
from bench.lib.models import WORKLOADS, Batch, Workload
from gckernels import sync
from gckernels.sync.lab import Network, sent_nbytes

PLAIN, AGAIN = "plain", "plain again"
FP16_HOOK, BF16_HOOK, POWERSGD_HOOK = "fp16_compress_hook", "bf16_compress_hook", "powerSGD_hook(rank=4)"
SILENT = "hook that sends nothing"
HOOKS = (FP16_HOOK, BF16_HOOK, POWERSGD_HOOK)
COMPRESSORS = (
    *("Identity", "Cast16", "Cast16(dtype=torch.float16)", "BlockQuant", "BlockQuant(bits=4)", "QSGD"),
    *("EFSignSGD", "TopK(ratio=0.01)", "ChunkTopK", "PowerSGD(rank=4)"),
)
RANK = 4  # for the PowerSGD of PyTorch
START = 2  # its first step with compression; it takes no smaller number
WARM_UP = 4  # steps until every arm does what it does for ever; DDP rebuilds its buckets after the first
THROUGH = " through "  # between a compressor and the name of a program
ONE_BUCKET_MB = 1024

OTHER_ARMS = (PLAIN, AGAIN, SILENT, *HOOKS)

Ticks = tuple[int, int, int, int]
"""When a step began, its backward began and ended, and the step ended, in nanoseconds of the monotonic clock."""


def checked_arm(text: str) -> str:
    """The name of an arm of :class:`Arm` in a command line, which is returned unchanged.

    Raises:
        argparse.ArgumentTypeError: no arm has this name.
    """
    compressor, through, program = text.partition(THROUGH)
    if text in OTHER_ARMS:
        return text
    try:
        gckernels.from_spec(compressor)
    except ValueError as error:
        allowed = f"a compressor or one of {', '.join(map(repr, OTHER_ARMS))}"
        raise argparse.ArgumentTypeError(f"expected {allowed}, got {text!r}") from error
    if through and program not in sync.programs.PROGRAMS:
        raise argparse.ArgumentTypeError(f"expected a program of {', '.join(sync.programs.PROGRAMS)}, got {program!r}")
    return text


@dataclass(frozen=True)
class Setting:
    """The model, the data of this rank, and the machines that all arms of a measurement have in common."""

    workload: Workload
    batch: Batch
    topology: sync.Topology

    @classmethod
    def of(cls, model: str, network: Network) -> Setting:
        """The setting of a model of ``models.py`` on a network."""
        batch = WORKLOADS[model].batch(torch.Generator().manual_seed(dist.get_rank()))
        return cls(WORKLOADS[model], batch, sync.Topology(network.machines, network.ranks_per_machine))


class Arm:
    """A model, its synchronisation and its optimizer, on a separate process group.

    Args:
        spec: a plan; :class:`~gckernels.sync.Auto`; a compressor as :func:`gckernels.from_spec` takes it, with
            " through " and a name of ``sync.programs.PROGRAMS`` if the program is not the default one; plain DDP; one
            of :data:`HOOKS`; or :data:`SILENT`, whose steps take what DDP itself takes.
        setting: the model, inputs and answers of every step, and the machines.

    Attributes:
        model: the DDP model.
        attachment: its attachment; ``None`` for plain DDP and PyTorch's hooks.
        attach_s: seconds that attaching took.
    """

    def __init__(self, spec: str | sync.Plan | sync.Auto, setting: Setting) -> None:
        workload = setting.workload
        # PyTorch's PowerSGD starts collectives in callbacks of futures: with two buckets or more, Gloo hangs
        cap_mb = ONE_BUCKET_MB if spec == POWERSGD_HOOK else workload.bucket_cap_mb
        self._group = dist.new_group()
        self.model = DistributedDataParallel(workload.model(), process_group=self._group, bucket_cap_mb=cap_mb)
        self.attachment: sync.Attachment | None = None
        self._loss, self._batch = workload.loss, setting.batch
        start_s = time.perf_counter()
        self._reduced_nbytes = self._attach(spec, setting.topology)
        self.attach_s = time.perf_counter() - start_s
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def _attach(self, spec: str | sync.Plan | sync.Auto, topology: sync.Topology) -> Callable[[], float] | None:
        """Register the hook; returns a function for the bytes that an arm without a compressor reduces in a step."""
        numel = sum(each.numel() for each in self.model.parameters())
        if isinstance(spec, sync.Plan | sync.Auto):
            self.attachment = sync.attach(self.model, spec)
            return None
        if spec in (PLAIN, AGAIN):
            return lambda: 4.0 * numel
        if spec in (SILENT, *HOOKS):
            return use_hook(self.model, spec, self._group)
        self.attachment = sync.attach(self.model, plan_of(spec, self.model, topology))
        return None

    @property
    def compresses(self) -> bool:
        """Whether gckernels synchronises anything, so that a trace of a step has stages."""
        return self.attachment is not None and self.attachment.plan.compresses

    def step(self) -> tuple[float, float]:
        """Train one step; returns its seconds, and the bytes that the interface has sent meanwhile; collective."""
        before, step_s = sent_nbytes(), self.step_s()
        dist.barrier()  # all bytes of the step have arrived
        return step_s, float(sent_nbytes() - before)

    def step_s(self) -> float:
        """Train one step; returns its seconds."""
        begin, _, _, end = self.ticks()
        return (end - begin) / 1e9

    def backward_s(self) -> float:
        """Train one step; returns the seconds of backward."""
        _, backward, averaged, _ = self.ticks()
        return (averaged - backward) / 1e9

    def alone(self) -> tuple[float, float, float]:
        """Train one step for which nothing is sent; returns the seconds of forward, backward and the optimizer."""
        with self.model.no_sync():
            begin, backward, averaged, end = self.ticks()
        return (backward - begin) / 1e9, (averaged - backward) / 1e9, (end - averaged) / 1e9

    def traced(self, path: Path) -> None:
        """Train one step and write its trace; collective."""
        with sync.record_timeline(path):
            self.ticks()

    def ticks(self) -> Ticks:
        """Train one step; returns its ticks."""
        inputs, answers = self._batch
        begin = time.perf_counter_ns()
        loss = self._loss(self.model(inputs), answers)
        backward = time.perf_counter_ns()
        loss.backward()
        averaged = time.perf_counter_ns()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return begin, backward, averaged, time.perf_counter_ns()

    def sent_nbytes(self) -> float:
        """Bytes that a rank sends in a step, without headers, as a mean over all ranks."""
        if self.attachment is not None:
            return self.attachment.sent_nbytes_per_step()
        assert self._reduced_nbytes is not None
        return sync.programs.allreduce_sent_nbytes(round(self._reduced_nbytes()), dist.get_world_size())

    def residual_nbytes(self) -> int:
        return 0 if self.attachment is None else self.attachment.residual_nbytes()

    def is_finite(self) -> bool:
        """Whether all parameters are finite; steps with NaN take another time than steps with numbers."""
        return all(bool(each.isfinite().all()) for each in self.model.parameters())

    def close(self) -> None:
        if self.attachment is not None:
            self.attachment.close()


def plan_of(spec: str, model: torch.nn.Module, topology: sync.Topology) -> sync.Plan:
    """The plan that compresses all of a model alike, by a compressor, which " through " a program may follow."""
    compressor, _, program = spec.partition(THROUGH)
    return sync.uniform_plan(model, compressor, program=program or None, topology=topology)


def use_hook(model: DistributedDataParallel, hook: str, group: dist.ProcessGroup) -> Callable[[], float]:
    """Register a hook that is not gckernels'; returns a function for the bytes that a step reduces.

    Args:
        model: the DDP model. For :data:`POWERSGD_HOOK` it has a single bucket.
        hook: one of :data:`HOOKS`, or :data:`SILENT`.
        group: the model's process group.
    """
    numel = sum(each.numel() for each in model.parameters())
    if hook == SILENT:
        model.register_comm_hook(None, _silent_hook)
        return lambda: 0.0
    if hook == POWERSGD_HOOK:
        state = PowerSGDState(group, matrix_approximation_rank=RANK, start_powerSGD_iter=START)
        model.register_comm_hook(state, powerSGD_hook)
        return lambda: 4.0 * state.total_numel_after_compression / max(state.iter - START, 1)
    model.register_comm_hook(group, default_hooks.fp16_compress_hook if hook == FP16_HOOK else _bf16_hook)
    return lambda: 2.0 * numel


# these hooks have no annotations, because DDP refuses postponed ones, which are text


def _silent_hook(_, bucket):
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# DDP refuses PyTorch's own hook on Gloo, by its name; the hook itself runs there
def _bf16_hook(group, bucket):
    return default_hooks.bf16_compress_hook(group, bucket)
