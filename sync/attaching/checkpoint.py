"""Checkpoints of all ranks together, for ``torch.distributed.checkpoint`` (DCP).

The residuals of an encoding of a unit are one tensor ``[ranks, elements]``, sharded by rows: every rank writes its row.
Residuals of shards and roots differ in size between ranks; shorter ones are padded with zeros. Factors are the same on
all ranks and are saved once, and so is the header (:mod:`~gckernels.sync.states.header`).

DCP loads into existing tensors, whose sizes depend on what was saved, so the header is read first. For a unit with the
same route as before, each rank reads its own row. For any other unit, each rank reads a part of the columns, in all
rows. It computes its part of the mass (:mod:`~gckernels.sync.states.resharding`) from them, and the parts are gathered,
one unit at a time. So no rank holds more of the old residuals than its share.

Ranks that have only parts of the parameters, as with replicas of shards, save one job for each part. Ranks with other
parts, or with all parameters, read the states of all ranks (:class:`.spread_jobs.SavedStates`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, full

from ..communication.agreement import agreed
from ..engine.runtime import Runtime
from ..frontends.frontend import UPDATES
from ..programs.residuals import ENCODINGS
from ..resources.feedback import KINDS, NOUNS, require_finite
from ..states.dcp_guard import Refusal, refuse_to_be_deeper
from ..states.header import GROUP, HEADER, PARKED, find_headers, name_of_group, own_group, parse, text_of
from ..states.jobs import AVERAGED, Job
from ..states.layout import FACTORS, RankState, kept_regions, route
from ..states.resharding import check_fit
from .saving import SavedTraining
from .spread_jobs import SavedStates, SpreadJob, loaded_states, saved_states, state_targets

_CPU = torch.device("cpu")
_ROWS, _COLUMNS = Shard(0), Shard(1)
_UNREAD = torch.nan  # marks elements that DCP has not loaded


class Checkpoint:
    """The residuals of an attachment on all its ranks, for ``torch.distributed.checkpoint`` (DCP).

    It is ``Stateful``: a value of the dict that every rank passes to ``save``, ``async_save`` or ``load``. The method
    ``checkpoint`` of an attachment creates it and documents its arguments.
    """

    def __init__(self, saved: SavedTraining, reads: Any, key: str | None) -> None:
        if not (reads is None or isinstance(reads, str | os.PathLike | StorageReader)):
            raise TypeError(f"checkpoint: reads must be a path or a StorageReader, got {type(reads).__name__}")
        if not (key is None or isinstance(key, str)):
            raise TypeError(f"checkpoint: key must be a string, got {type(key).__name__}")
        self._training, self._key = saved, key
        self._all: SavedStates | None = None  # if those of all ranks are read
        self._reads: Any = FileSystemReader(reads) if isinstance(reads, str | os.PathLike) else reads

    @property
    def _runtime(self) -> Runtime:
        """The runtime of the plan that runs now."""
        return self._training.frontend.runtime

    def state_dict(self) -> dict[str, Any]:
        """The tensors and the header that DCP saves, or the tensors into which it loads.

        With ``reads``, and until something has been loaded, these are tensors to load into. Then the call is
        collective, because all ranks read the header together. Otherwise they are copies in host memory.

        Raises:
            ValueError: ``reads`` has nothing of gckernels, or states that do not fit the plan.
            RuntimeError: another rank could not read it. Every rank raises.
        """
        if self._reads is None:
            inside, found = name_of_group(self._runtime.group), self._saved()
        else:
            texts = self._read_headers()
            part = self._runtime.part
            own = own_group(texts, name_of_group(self._runtime.group), None if part is None else part.entry)
            if own is None:
                self._all = SavedStates(texts)
                return self._all.targets()
            inside, found = own, self._targets(self._adopted(texts[own]))
        return {inside: found} if inside else found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the tensors that DCP has loaded. Collective.

        Raises:
            ValueError: the tensors are incomplete or damaged, or do not fit the plan. Nothing has been changed.
            RuntimeError: another rank has raised this error. Nothing has been changed.
        """
        if self._all is not None:
            self._training.load_state_dict(self._all.loaded(state_dict), together=True)
            self._reads = self._all = None
            return
        runtime = self._runtime

        def check() -> tuple[tuple[SpreadJob, Callable[[], None]], list[str]]:
            inner = [each for name, each in state_dict.items() if name.startswith(GROUP)]
            state = inner[0] if len(state_dict) == len(inner) == 1 else state_dict
            job = parse(state.get(HEADER))
            check_fit(job.plan, runtime.plan)
            loaded = self._loaded(job, state)
            states = loaded_states(state, ranks) if (ranks := self._states(job)) else []
            return (loaded, self._training.read_rest(loaded, states)), [state[HEADER]]

        job, take_rest = agreed("load", runtime.group, runtime.device, check)
        self._training.frontend.settle()
        runtime.take_over(job)
        take_rest()
        self._reads = None  # from now on the object is for saving

    __create_write_items__ = refuse_to_be_deeper

    # ---------------------------------------------------------------- saving

    def _saved(self) -> dict[str, Any]:
        runtime = self._runtime
        own = saved_states(self._training.own_state(), runtime.rank)
        state = runtime.state_dict(_CPU)
        parking = self._training.parking
        parts, sizes = parking.state_dict(_CPU), parking.sizes
        found: dict[str, Any] = {HEADER: text_of(state | self._training.notes(), sizes)}
        feedback: RankState = state["feedback"]
        job = Job(runtime.plan, runtime.topology, state["step"], frozenset(state["units"]), {})
        rows = [(kind, unit.key, width, feedback[kind].get(unit.key)) for unit, kind, width in job.largest_residuals()]
        rows += [(PARKED, name, width, parts.get(name)) for name, width in sizes.items()]
        mesh = self._mesh()
        for kind, key, width, values in rows:
            found.setdefault(kind, {})[key] = DTensor.from_local(_row(values, width), mesh, [_ROWS])
        return found | own | {kind: feedback[kind] for kind in FACTORS if feedback[kind]}

    # ---------------------------------------------------------------- loading

    def _read_headers(self) -> dict[str, str]:
        """The headers, by the names of the groups that have saved them. Collective."""
        runtime, reader = self._runtime, self._reads

        def find() -> tuple[dict[str, str], list[str]]:
            names = find_headers(reader.read_metadata(), self._key)
            return names, sorted(names.values())

        names = agreed("load", runtime.group, runtime.device, find)
        read: dict[str, Any] = dict.fromkeys(sorted(names.values()), "")
        load(read, storage_reader=reader, process_group=runtime.group)
        for text in read.values():
            parse(text)  # checks it
        return {group: read[name] for group, name in names.items()}

    def _adopted(self, text: str) -> Job:
        """The job of a header, without residuals and factors, whose plan runs now if there is no other. Collective."""
        job = parse(text)
        if self._training.adopts_plans:
            self._training.adopt(job.plan)
        check_fit(job.plan, self._runtime.plan)
        return job

    def _targets(self, job: Job) -> dict[str, Any]:
        found: dict[str, Any] = {HEADER: Refusal(b"what checkpoint() was given to read has not been loaded yet")}
        ranks, mesh = job.topology.world_size, self._mesh()
        for kind, key, width, placement in self._spread(job):
            rows = full((ranks, width), _UNREAD, dtype=torch.float32, device_mesh=mesh, placements=[placement])
            found.setdefault(kind, {})[key] = rows
        for kind, key, numel in self._factors(job):
            found.setdefault(kind, {})[key] = torch.full((numel,), _UNREAD, dtype=torch.float32, device="cpu")
        return found | (state_targets(states) if (states := self._states(job)) else {})

    def _states(self, job: Job) -> range:
        """The ranks whose states of front ends this rank reads: itself, or all of a job with another number of ranks;
        none if the job has none."""
        rank, ranks = self._runtime.rank, job.topology.world_size
        if job.notes.get(AVERAGED) != UPDATES:
            return range(0)
        return range(rank, rank + 1) if ranks == self._runtime.world_size else range(ranks)

    def _loaded(self, job: Job, state_dict: dict[str, Any]) -> SpreadJob:
        """The job in the loaded ``state_dict``; raises :class:`ValueError` unless that is complete."""
        rank, units = self._runtime.rank, job.plan.by_key
        own: RankState = {kind: {} for kind in KINDS}
        columns: RankState = {kind: {} for kind in ENCODINGS}
        parked: dict[str, torch.Tensor] = {}
        for kind, key, width, placement in self._spread(job):
            rows, expected = state_dict.get(kind, {}).get(key), ((job.topology.world_size, width), (placement,))
            is_read = isinstance(rows, DTensor) and ((*rows.shape,), rows.placements) == expected
            local: torch.Tensor | None = rows.to_local() if is_read else None
            if kind == PARKED:
                if local is None or not local.isfinite().all():
                    raise ValueError(f"checkpoint: what was parked of {key} has not been loaded, or holds inf or NaN")
                parked[key] = local[0] if placement == _ROWS else local
                continue
            if local is None:
                raise ValueError(_not_read(kind, key))
            if placement == _COLUMNS:
                columns[kind][key] = local
                continue
            encoding = kept_regions(units[key], job.topology, rank)[kind]
            if size := units[key].encoder(kind).traits.states * (encoding.stop - encoding.start):
                own[kind][key] = local[0, :size]
        for kind, key, numel in self._factors(job):
            factor = state_dict.get(kind, {}).get(key)
            if not isinstance(factor, torch.Tensor) or (*factor.shape,) != (numel,):
                raise ValueError(_not_read(kind, key))
            own[kind][key] = factor
        for state in (own, columns):
            for kind, tensors in state.items():
                for key, tensor in tensors.items():
                    require_finite("checkpoint", kind, key, tensor)
        shared = (job.plan, job.topology, job.step, job.units, {rank: own}, columns, self._runtime)
        return SpreadJob(*shared, notes=job.notes, parked={rank: parked}, parked_sizes=job.parked_sizes)

    def _spread(self, job: Job) -> Iterator[tuple[str, str, int, Shard]]:
        """The old tensors that are spread over the ranks: what was parked, and residuals, of which a new job of one
        rank needs none.

        Yields:
            Kind, name, number of columns, and whether each rank reads its own row or a part of the columns.
        """
        runtime = self._runtime
        if runtime.world_size > 1:
            now = {unit.key: route(unit, runtime.topology) for unit in runtime.plan.units}
            for unit, kind, width in job.largest_residuals():
                yield kind, unit.key, width, _ROWS if route(unit, job.topology) == now[unit.key] else _COLUMNS
        placement = _ROWS if job.topology.world_size == runtime.world_size else _COLUMNS
        for name, width in job.parked_sizes.items():
            yield PARKED, name, width, placement

    def _factors(self, job: Job) -> Iterator[tuple[str, str, int]]:
        """Kind, unit and number of elements of each old factor, of which a new job of one rank needs none."""
        return job.factors() if self._runtime.world_size > 1 else iter(())

    def _mesh(self) -> DeviceMesh:
        return DeviceMesh.from_group(self._runtime.group, _CPU.type)


def _row(values: torch.Tensor | None, width: int) -> torch.Tensor:
    """A vector as ``[1, width]``, with zeros at its end; zeros if there is none."""
    if values is not None and values.numel() == width:
        return values.view(1, width)
    row = torch.zeros(1, width, dtype=torch.float32, device=_CPU)
    if values is not None:
        row[0, : values.numel()] = values
    return row


def _not_read(kind: str, key: str) -> str:
    return (
        f"checkpoint: the saved {NOUNS[kind]} of {key} has not been loaded; to load into a new job, or into one "
        "with another number of ranks or another plan, pass the checkpoint's path: checkpoint(reads=path)"
    )
