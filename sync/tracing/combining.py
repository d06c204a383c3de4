"""One trace of what all ranks have measured."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import gckernels
from gckernels.devices import is_accelerator, name_of

from ..communication.cores import Cores
from ..frontends.sharded.shard_groups import ShardGroup
from ..traces.model_parameters import roles_of, traced_tensor
from ..traces.model_trace import ModelTrace
from ..traces.traced_tensors import TracedGather
from .watch import NOT_READY, StepTimes, WatchedStep

_NOTABLE = 0.05  # a smaller part of a step is not worth a word


@dataclass(frozen=True)
class RecordingRanks:
    """The ranks that record together."""

    group: dist.ProcessGroup | None  # their process group; None for a process alone
    count: int  # their number
    device: torch.device  # a device whose tensors the group can send

    def reduced(self, values: torch.Tensor, operation: Any) -> torch.Tensor:
        """The sum, the maximum or the minimum of each value over the ranks. Collective."""
        if self.group is None:
            return values
        values = values.to(self.device)
        dist.all_reduce(values, op=operation, group=self.group)
        return values.cpu()


@dataclass(frozen=True)
class Averaged:
    """The gradients of a step on this rank when they had been averaged."""

    number: int  # the number of the step, from 1 since the recording began
    digests: torch.Tensor  # a number for every gradient, [n] int64
    used: Sequence[bool]  # which of the parameters this rank has used


def refuse_different(names: Sequence[str], steps: Sequence[Averaged], ranks: RecordingRanks) -> None:
    """Check that gradients were the same on all ranks when they had been averaged. Collective.

    Args:
        names: the names of the parameters. A parameter that no rank has used in a step does not count in it.
        steps: the recorded steps of this rank.

    Raises:
        RuntimeError: they were not. Every rank raises.
    """
    if not steps:
        return
    mine = torch.tensor([step.used for step in steps], dtype=torch.int32, device="cpu")
    used = ranks.reduced(mine, dist.ReduceOp.MAX)
    found = torch.stack([step.digests for step in steps]).where(used.to(steps[0].digests.device) > 0, 0)
    least, largest = (ranks.reduced(found.clone(), each).cpu() for each in (dist.ReduceOp.MIN, dist.ReduceOp.MAX))
    for step, row in zip(steps, (least != largest).tolist(), strict=True):
        if different := [name for name, differs in zip(names, row, strict=True) if differs]:
            others = f" and {len(different) - 1} more" if len(different) > 1 else ""
            raise RuntimeError(
                f"gckernels: in step {step.number} since the recording began, the averaged gradients of {different[0]}"
                f"{others} are not the same on all ranks, so the replicas of the model differ from then on"
            )


def combined(
    module: torch.nn.Module,
    name: str,
    parameters: Mapping[str, torch.nn.Parameter],
    steps: Sequence[WatchedStep],
    measured: Mapping[str, tuple[float, Mapping[str, float]]],
    specs: Sequence[str],
    buckets: tuple[tuple[str, ...], ...],
    ranks: RecordingRanks,
) -> ModelTrace:
    """The trace, the same on all ranks. Collective.

    Args:
        module: the model.
        parameters: its recorded parameters, by name.
        steps: the times of this rank.
        measured: norms and errors of the tensors that this rank has kept.
        specs: the measured compressors.
        buckets: DDP's buckets.
    """
    excludes = Cores.of(ranks.group, ranks.device).suffice
    forward_s, optimizer_s, ready_s, disturbed = _times(list(parameters), steps, ranks, excludes)
    norms, errors = _norms_and_errors(list(parameters), measured, specs, ranks)
    order = sorted(parameters, key=ready_s.__getitem__)
    roles = roles_of(module, parameters, order)
    tensors = [
        replace(
            traced_tensor(each, parameters[each], ready_s[each], roles[each]), norm=norms.get(each), errors=errors[each]
        )
        for each in order
    ]
    last_s = tensors[-1].ready_s
    return ModelTrace(
        name, tuple(tensors), last_s, forward_s, optimizer_s, buckets, _source(len(steps), ranks, disturbed)
    )


def with_gathers(
    trace: ModelTrace,
    groups: Sequence[ShardGroup],
    reduced: Sequence[int],
    gathered: Sequence[int],
    times: Sequence[Sequence[Sequence[Sequence[float]]]],
    ranks: RecordingRanks,
) -> ModelTrace:
    """The trace of a model of FSDP2 with its groups and their gathers, the same on all ranks. Collective.

    Args:
        trace: the trace without them.
        reduced: the numbers of the groups in the order in which they were reduced.
        gathered: the numbers of the groups in the order in which they were gathered.
        times: ``[steps, gathers, 2, 2]``, seconds from the start of a step on this rank until FSDP asked for a gather,
            and until it was needed; the parts of them in which the thread waited for a core. Medians over the steps and
            means over the ranks count.
    """
    elapsed_s, waiting_s = _seconds(times).view(len(times), len(gathered), 2, 2).unbind(2)
    computing_s = elapsed_s - waiting_s if Cores.of(ranks.group, ranks.device).suffice else elapsed_s
    middle = ranks.reduced(computing_s.median(0).values, dist.ReduceOp.SUM) / ranks.count
    names = [tuple(shard.name for shard in group.shards()) for group in groups]
    gathers, latest_s = [], 0.0
    for index, (asked_s, needed_s) in zip(gathered, middle.tolist(), strict=True):
        latest_s = max(latest_s, asked_s)  # means may differ in order by a hair
        frozen = sum(each.numel() for each in groups[index].parameters().values() if not each.requires_grad)
        gathers.append(TracedGather(names[index], latest_s, max(needed_s, latest_s), frozen))
    order = dict.fromkeys((*reduced, *range(len(groups))))
    return replace(trace, buckets=tuple(names[index] for index in order if names[index]), gathers=tuple(gathers))


def _seconds(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu")


def _times(
    names: Sequence[str], steps: Sequence[WatchedStep], ranks: RecordingRanks, excludes: bool
) -> tuple[float, float, dict[str, float], float]:
    """The seconds of forward, of the optimizer, and until each gradient is ready, as medians over the steps; and the
    part of a step that is excluded.

    Ranks are together when gradients have been averaged. From then on the slowest rank counts for each gradient; it
    need not be the same one before backward and in it. So forward and optimizer are means over the ranks, and the time
    by which the slowest rank is later with a gradient is a part of backward.

    Args:
        names: the names of the parameters.
        steps: the times of this rank.
        excludes: whether to exclude the time in which a rank waited for a core that another program had. Two ranks that
            Linux lets run on one core for seconds, beside an idle one, would take twice as long as in later steps.
    """
    outside, ready = _table([step.elapsed for step in steps])
    waiting, waiting_ready = _table([step.waiting for step in steps])
    whole_s = float((outside.sum(1) + ready.amax(1).clamp(min=0.0)).sum())
    waiting_s = float((waiting.sum(1) + waiting_ready.amax(1).clamp(min=0.0)).sum())
    if excludes:
        outside, ready = outside - waiting, torch.where(ready >= 0, ready - waiting_ready, NOT_READY)
    total = torch.where(ready >= 0, ready + outside.sum(1, keepdim=True), NOT_READY)
    mean = ranks.reduced(outside, dist.ReduceOp.SUM) / ranks.count
    slowest = ranks.reduced(total, dist.ReduceOp.MAX)
    ready = torch.where(slowest >= 0, (slowest - mean.sum(1, keepdim=True)).clamp(min=0.0), NOT_READY)
    ready_s = {name: _median(times) for name, times in zip(names, ready.T.tolist(), strict=True)}
    before = [each for each in mean[:, 1].tolist() if each]
    lost = torch.tensor([waiting_s / whole_s if excludes else 0.0], dtype=torch.float64, device="cpu")
    excluded = float(ranks.reduced(lost, dist.ReduceOp.MAX))
    return statistics.median(mean[:, 0].tolist()), _median(before), ready_s, excluded


def _table(steps: Sequence[StepTimes]) -> tuple[torch.Tensor, torch.Tensor]:
    """The seconds of forward and of the optimizer before it, ``[steps, 2]``, and of gradients, ``[steps, n]``."""
    outside = _seconds([[step.forward_s, step.before_s or 0.0] for step in steps])
    return outside, _seconds([step.ready_s for step in steps])


def _norms_and_errors(
    names: Sequence[str],
    measured: Mapping[str, tuple[float, Mapping[str, float]]],
    specs: Sequence[str],
    ranks: RecordingRanks,
) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The norms and errors that all ranks together have measured, by tensor."""
    values = torch.full((len(names), 1 + len(specs)), NOT_READY, dtype=torch.float64, device="cpu")
    for index, name in enumerate(names):
        if name in measured:
            norm, errors = measured[name]
            row = [norm, *(errors.get(spec, NOT_READY) for spec in specs)]
            values[index] = torch.tensor(row, dtype=torch.float64, device="cpu")
    rows = dict(zip(names, ranks.reduced(values, dist.ReduceOp.MAX).tolist(), strict=True))
    known = {
        name: {spec: error for spec, error in zip(specs, row[1:], strict=True) if error >= 0}
        for name, row in rows.items()
    }
    return {name: row[0] for name, row in rows.items() if row[0] >= 0}, known


def _source(steps: int, ranks: RecordingRanks, excluded: float) -> str:
    """The text on where the numbers come from.

    Args:
        steps: the number of steps.
        excluded: the part of a step that is excluded.
    """
    where = f"{platform.machine()} with {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    if is_accelerator(ranks.device):
        where = name_of(ranks.device)
    if excluded >= _NOTABLE:
        where += f", without the {excluded:.0%} of the time in which other programs had the cores"
    return (
        f"{steps} steps on {ranks.count} {'rank' if ranks.count == 1 else 'ranks'}, {where}, recorded by gckernels "
        f"{gckernels.__version__} with torch {torch.__version__} on {datetime.date.today()}"
    )


def _median(times: Sequence[float]) -> float:
    """The median of those times that are known; 0 if none is."""
    known = [each for each in times if each >= 0]
    return statistics.median(known) if known else 0.0
