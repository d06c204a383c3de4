"""Jobs in checkpoints of ``torch.distributed.checkpoint`` (DCP), as the ranks of a new job read them.

:class:`SpreadJob` spreads residuals over the ranks. If ranks had other parts of the parameters
(:mod:`~gckernels.sync.states.parts`), every rank reads the states of all ranks (:class:`SavedStates`), and holds their
residuals in the memory of the host for a moment.

A front end of updates has a state of its own on each rank, such as the moments of its optimizer. DCP keeps one of the
values with the same name, so each rank saves its state under a name of its own, as bytes. Entries that are the same on
all ranks are saved once.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..communication.collectives import all_gather
from ..engine.runtime import Runtime
from ..frontends.frontend import UPDATES
from ..plans.plan import UnitPlan
from ..programs.residuals import EncodedRegion
from ..resources.feedback import KINDS
from ..states.dcp_guard import Refusal
from ..states.header import HEADER, PARKED, parse, part_in
from ..states.jobs import Job
from ..states.layout import RankState, kept_regions, max_sizes, residual_sizes

_COMMON, _SAME = "all ranks", ("anchors", "outer")


@dataclass(frozen=True)
class SpreadJob(Job):
    """A job whose old residuals are spread over the ranks of the new job.

    Attributes:
        feedback: residuals of the calling rank alone, for units with the same route as before; and factors.
        columns: residuals of all other units, ``[old ranks, columns]``: this rank's part of the columns.
        runtime: the runtime of the new job.
    """

    columns: RankState
    runtime: Runtime

    @property
    def is_whole(self) -> bool:
        return True

    @property
    def has_unsent(self) -> bool:
        return any(self.largest_residuals())

    def parked_part(self, rank: int, world_size: int) -> dict[str, torch.Tensor]:
        """As in :class:`Job`. Collective if the old job had another number of ranks."""
        mine = self.parked[rank]
        if world_size == self.topology.world_size:
            return dict(mine)
        means = {}
        for name, numel in self.parked_sizes.items():
            columns = torch.zeros(-(-numel // world_size), dtype=torch.float64, device="cpu")
            columns[: mine[name].shape[1]] = mine[name].double().mean(0)
            everything = torch.empty(world_size, columns.numel(), dtype=torch.float64, device=self.runtime.device)
            all_gather(everything.view(-1), columns.to(everything.device), group=self.runtime.group)
            means[name] = everything.flatten()[:numel].float().cpu()
        return means

    def weighted_residuals(self, unit: UnitPlan) -> Iterator[tuple[str, EncodedRegion, torch.Tensor]]:
        """As in :class:`Job`. Collective: every rank asks for the same units in the same order."""
        group, world_size = self.runtime.group, self.runtime.world_size
        for kind, width in max_sizes(unit, self.topology).items():
            if (rows := self.columns[kind].get(unit.key)) is None:
                continue
            each = [kept_regions(unit, self.topology, rank)[kind] for rank in range(self.topology.world_size)]
            distinct = {encoding: index for index, encoding in enumerate(dict.fromkeys(each))}
            part = torch.zeros(len(distinct), -(-width // world_size), dtype=torch.float64, device="cpu")
            for row, encoding in zip(rows, each, strict=True):
                part[distinct[encoding], : row.numel()] += row.double().mul_(encoding.weight)
            parts = torch.empty(world_size, *part.shape, dtype=part.dtype, device=self.runtime.device)
            all_gather(parts.view(-1), part.to(parts.device).view(-1), group=group)
            for encoding, vector in zip(distinct, parts.cpu().transpose(0, 1).flatten(1), strict=True):
                yield kind, encoding, vector[: unit.encoder(kind).traits.states * (encoding.stop - encoding.start)]


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


# -------------------------------------------------------------------- states of front ends


def saved_states(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """The values that a rank saves of the state of its front end, which has updates or nothing."""
    if UPDATES not in state:
        return {}
    own = {name: each for name, each in state[UPDATES].items() if name not in _SAME}
    same = {name: state[UPDATES][name] for name in _SAME}
    return {UPDATES: {_COMMON: _packed(same), _name(rank): _packed(own)}}


def state_targets(ranks: range) -> dict[str, Any]:
    """The values into which DCP loads the states of some ranks."""
    return {UPDATES: dict.fromkeys((_COMMON, *map(_name, ranks)), b"")}


def loaded_states(state_dict: Mapping[str, Any], ranks: range) -> list[dict[str, Any]]:
    """The states of some ranks, which DCP has loaded, as front ends read them.

    Raises:
        ValueError: a state is missing or damaged.
    """
    found = state_dict.get(UPDATES, {})
    same = _unpacked(found.get(_COMMON), _COMMON)
    return [{"rank": rank, UPDATES: same | _unpacked(found.get(_name(rank)), _name(rank))} for rank in ranks]


def _name(rank: int) -> str:
    return f"rank {rank}"


def _packed(state: dict[str, Any]) -> bytes:
    packed = io.BytesIO()
    torch.save(state, packed)
    return packed.getvalue()


def _unpacked(packed: Any, name: str) -> dict[str, Any]:
    try:
        # DCP has unpickled the checkpoint already, and states of optimizers may have values of any type
        state: dict[str, Any] = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)
        return {**state}
    except Exception as error:
        raise ValueError(f"checkpoint: the state of {name} has not been loaded, or is damaged") from error
