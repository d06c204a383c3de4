"""The states of all ranks in a checkpoint of ``torch.distributed.checkpoint`` (DCP), which every rank reads as a whole.

They are needed if the ranks of the job had other parts of the parameters (:mod:`~gckernels.sync.states.parts`). A rank
then holds the residuals of all ranks in the memory of the host for a moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ..resources.feedback import KINDS
from ..states.dcp_guard import Refusal
from ..states.header import HEADER, PARKED, parse, part_in
from ..states.jobs import Job
from ..states.layout import residual_sizes


class SavedStates:
    """The states of all ranks of a job.

    Args:
        texts: its headers by the names of the groups that have saved them, which are checked.
    """

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._jobs = {group: (parse(text), part_in(text)) for group, text in texts.items()}

    def targets(self) -> dict[str, Any]:
        """The tensors into which DCP loads."""
        found: dict[str, Any] = {}
        for group, (job, _) in self._jobs.items():
            inner: dict[str, Any] = {HEADER: Refusal(b"what checkpoint() was given to read has not been loaded yet")}
            for kind, key, shape in _shapes(job):
                inner.setdefault(kind, {})[key] = torch.full(shape, torch.nan, dtype=torch.float32, device="cpu")
            found |= {group: inner} if group else inner
        return found

    def loaded(self, state_dict: dict[str, Any]) -> list[dict[str, Any]]:
        """The state of each rank, from the tensors that DCP has loaded. Elements that are missing are NaN, which
        readers of states refuse."""
        found = []
        for group, (job, part) in self._jobs.items():
            inner = state_dict[group] if group else state_dict
            head = {"step": job.step, "world_size": job.topology.world_size, "plan": job.plan.to_json()}
            head |= {"units": sorted(job.units), **job.notes} | ({} if part is None else {"part": part})
            for rank in range(job.topology.world_size):
                sizes = residual_sizes(job.plan, job.topology, rank)
                parts: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in (*KINDS, PARKED)}
                for kind, key, shape in _shapes(job):
                    values = inner[kind][key] if len(shape) == 1 else inner[kind][key][rank]
                    numel = values.numel() if kind == PARKED else sizes[kind].get(key, 0)
                    if numel:
                        parts[kind][key] = values[:numel]
                parked = parts.pop(PARKED)
                found.append(head | {"rank": rank, "feedback": parts} | ({PARKED: parked} if parked else {}))
        return found


def _shapes(job: Job) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Kind, name and shape of each saved tensor. Rows are those of ranks."""
    ranks = job.topology.world_size
    for unit, kind, width in job.largest_residuals():
        yield kind, unit.key, (ranks, width)
    for name, width in job.parked_sizes.items():
        yield PARKED, name, (ranks, width)
    for kind, key, numel in job.factors():
        yield kind, key, (numel,)
