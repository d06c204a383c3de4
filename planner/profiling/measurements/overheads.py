"""Measurement of the engine's own overheads: stages, submission, hooks, and buckets of DDP without a hook."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gckernels.devices import is_accelerator
from gckernels.sync.engine.engine import Engine
from gckernels.sync.messages.message import Message
from gckernels.sync.programs.stages import Resource, StageKind, StageSpec
from gckernels.sync.resources.lanes import DeviceLanes
from gckernels.sync.resources.stage import Stage

from ...machines.machine import Overheads
from .session import Session

_COUNTS = (1, 3, 5)  # stages of a message
_CALLS = 30
_LAYERS, _WIDTH = 12, 64
_BUCKET_MB = 0.01


def load_ddp(group: dist.ProcessGroup, device: torch.device) -> None:
    """Make a DDP model, whose first one in a process imports hundreds of modules, which takes seconds. Collective."""
    DistributedDataParallel(torch.nn.Linear(1, 1, dtype=torch.float32, device=device), process_group=group)


def measure_overheads(session: Session) -> Overheads:
    """The overheads on the slowest rank. Collective.

    On CUDA the times of the host are measured, which no run has checked.
    """
    stage_s, submit_s, message_s = _engine(session)
    hook_s, plain_s = _hooks(session)
    return Overheads(*session.ranks.slowest([stage_s, submit_s, hook_s + message_s, plain_s]))


# -------------------------------------------------------------------- the engine


def _engine(session: Session) -> tuple[float, float, float]:
    """Seconds of a stage, and seconds of the submitting thread for a stage and for a message."""
    engine = Engine(DeviceLanes(session.places.device), max(_COUNTS) // 2)
    try:
        found = [[_message(engine, count) for count in _COUNTS] for _ in range(session.extent.rounds + 2)]
    finally:
        engine.lanes.close()
    walls, submits = np.median(np.array(found), axis=0).T
    stage_s, _ = np.polyfit(_COUNTS, walls, 1)
    submit_s, message_s = np.polyfit(_COUNTS, submits, 1)
    return tuple(max(float(each), 0.0) for each in (stage_s, submit_s, message_s))  # type: ignore[return-value]


def _message(engine: Engine, stages: int) -> tuple[float, float]:
    """Seconds of a message of empty stages, and those of the submitting thread."""
    message = Message()
    message.keys, message.sent_nbytes = ("empty",), 0.0
    message.stages = [Stage(_spec(index), lambda: None) for index in range(stages)]
    submit_s, start_s = 0.0, time.perf_counter()
    for _ in range(_CALLS):
        ended = threading.Event()
        begun_s = time.thread_time()
        token = engine.submit(message, 1, (engine.lanes.here(),))
        engine.finish([token], ended.set, _failed)
        submit_s += time.thread_time() - begun_s
        ended.wait()
    return (time.perf_counter() - start_s) / _CALLS, submit_s / _CALLS


def _spec(index: int) -> StageSpec:
    if index % 2:
        return StageSpec(StageKind.COLLECTIVE, "AllGather", index // 2, Resource.COMMUNICATE, index, index + 1)
    return StageSpec(StageKind.ENCODE, "Encode", index // 2, Resource.COMPUTE, index, index + 1)


def _failed(error: BaseException) -> None:
    raise AssertionError("an empty stage has failed") from error


# -------------------------------------------------------------------- hooks


def _hooks(session: Session) -> tuple[float, float]:
    """Seconds of backward's thread for a bucket of DDP: with a hook that sends nothing, and without a hook."""
    device = session.places.device
    layers = [torch.nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=torch.float32, device=device) for _ in range(_LAYERS)]

    def wrapped() -> DistributedDataParallel:
        model = torch.nn.Sequential(*layers)
        return DistributedDataParallel(model, process_group=session.ranks.group, bucket_cap_mb=_BUCKET_MB)

    plain, hooked = wrapped(), wrapped()
    buckets = [0]

    def hook(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        buckets[0] += 1
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    hook.__annotations__.clear()  # DDP compares annotations with types, and these are texts
    hooked.register_comm_hook(None, hook)
    batch = torch.randn(8, _WIDTH, dtype=torch.float32, device=device)

    def alone() -> float:
        with plain.no_sync():
            return _backward_s(plain, batch)

    arms: Sequence[Callable[[], float]] = (alone, lambda: _backward_s(hooked, batch), lambda: _backward_s(plain, batch))
    rounds = []
    for _ in range(session.extent.rounds + 2):
        buckets[0] = 0
        rounds.append([arm() for arm in arms])
    medians = [statistics.median(column) for column in zip(*rounds[2:], strict=True)]  # DDP rebuilds its buckets first
    count = max(buckets[0], 1)
    return max(medians[1] - medians[0], 0.0) / count, max(medians[2] - medians[0], 0.0) / count


def _backward_s(model: DistributedDataParallel, batch: torch.Tensor) -> float:
    """Seconds of the thread that runs backward: on the CPU this one, and only those in which it computes."""
    loss = model(batch).square().mean()
    clock = time.perf_counter if is_accelerator(batch.device) else time.thread_time
    start_s = clock()
    loss.backward()
    elapsed_s = clock() - start_s
    model.zero_grad()
    return elapsed_s
