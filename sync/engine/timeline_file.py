"""Timelines in files for Perfetto or Chrome's tracing."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..communication.collectives import all_gather, device_of_group
from ..plans.json_files import write_whole
from . import recorded_step
from .timeline_recorder import Record, TimelineRecorder


@contextlib.contextmanager
def record_timeline(path: str | os.PathLike[str]) -> Iterator[None]:
    """Record what the engines of all ranks run inside the ``with`` block, and write one file at its end.

    Collective: every rank of the default group enters and leaves the block, and rank 0 writes. Without a default group
    the trace has one rank. Work that has not ended when the block is left is not in the file.

    If the block raises, nothing is communicated, because other ranks may be gone. This rank writes its own part to
    ``out.rank1.json`` (for rank 1) instead of ``out.json``, and the exception propagates.

    Args:
        path: path of the file: JSON in Chrome's format, with a process for every rank and a thread for every lane.

    Raises:
        RuntimeError: this process records a timeline already.
    """
    if recorded_step.timeline is not None:
        raise RuntimeError("record_timeline: this process records a timeline already; they cannot be nested")
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    target = Path(path)
    mine = recorded_step.timeline = TimelineRecorder(rank)
    try:
        try:
            yield
        finally:
            recorded_step.timeline = None
        records = _gather(mine.record(wait=True), rank, ranks)
    except BaseException:
        with contextlib.suppress(Exception):  # the first error is the one to report
            _write(target.with_stem(f"{target.stem}.rank{rank}"), [mine.record(wait=False)])
        raise
    if rank == 0:
        _write(target, records)


def _gather(record: Record, rank: int, ranks: int) -> list[Record]:
    """The records of all ranks on rank 0, its own record on every other rank. Nothing is pickled."""
    if ranks == 1:
        return [record]
    device = device_of_group(dist.distributed_c10d._get_default_group())
    text = json.dumps(record).encode()
    sizes = torch.empty(ranks, dtype=torch.int64, device=device)
    all_gather(sizes, torch.tensor([len(text)], dtype=torch.int64, device=device))
    nbytes = sizes.tolist()
    sent = torch.frombuffer(bytearray(text.ljust(max(nbytes))), dtype=torch.uint8).to(device)
    received = [torch.empty_like(sent) for _ in nbytes] if rank == 0 else None
    dist.gather(sent, received)
    if received is None:
        return [record]
    return [json.loads(each[:n].cpu().numpy().tobytes()) for each, n in zip(received, nbytes, strict=True)]


def _write(path: Path, records: Sequence[Record]) -> None:
    """Write all records into one file. Times count from the first event."""
    events: list[dict[str, Any]] = []
    started = min((event["ts"] for record in records for event in record["events"]), default=0)
    for record in records:
        pid = record["rank"]
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": f"rank {pid}"}})
        for tid, lane in enumerate(record["lanes"]):
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": lane}})
        for event in record["events"]:
            args = {
                key.replace("_ns", "_us"): (value - started) / 1000 if key.endswith("_ns") else value
                for key, value in event["args"].items()
            }
            times = {"ts": (event["ts"] - started) / 1000, "dur": event["dur"] / 1000}
            events.append(event | times | {"args": args})
    anchors = {f"rank {record['rank']}": record["anchor_ns"] for record in records}
    clock = {"started_ns": started, "anchor_ns": anchors}
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": clock}))
