"""The engine's own cost, per message and per stage, against threads and queues without an engine.

    python -m bench.sync.stage_cost

One rank on the CPU, whose collectives return immediately (torch's process group ``fake``). Each arm runs the same works
of the same messages:

- ``calls``: one after the other, in the thread that submits;
- ``one thread``: one thread, to which a bare queue hands each message over;
- ``a thread per stage``: one thread for each stage, with a bare queue before each of them;
- ``engine``: the engine.

The works are empty, or the stages of programs with small units. A row has, for each arm, the median over the rounds:

- ``submit_us``: processor time of the submitting thread per message, up to its return from the submission;
- ``cpu_us``: processor time of all threads per message;
- ``wall_us``: time per message, from the first submission until the submitting thread knows that all are done;
- ``sleeps``: how often a thread has gone to sleep, per message: the waiting ones must be woken.

``cpu_us_per_stage`` is ``cpu_us`` beyond that of the calls alone, divided by the number of stages. ``cpu_ratio`` and
``wall_ratio`` are the medians of the ratios to ``one thread`` in the same round. Arms take turns. Writes
``bench/results/cpu/stage_cost.csv``.
"""

from __future__ import annotations

import functools
import gc
import math
import queue
import resource
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

with suppress(ImportError):  # registers the process group
    import torch.testing._internal.distributed.fake_pg

import gckernels
from bench.lib.program import program_parser
from bench.lib.record import write_csv
from bench.lib.rounds import CPU, take_turns
from gckernels.sync import Topology, UnitPlan
from gckernels.sync.communication.communicators import DryCommunicators
from gckernels.sync.engine.engine import Engine
from gckernels.sync.messages.encoded import EncodedMessage
from gckernels.sync.messages.lowrank import LowRankMessage
from gckernels.sync.messages.message import DenseMessage, Message, Unit
from gckernels.sync.messages.seeds import Seeds
from gckernels.sync.programs import ALLREDUCE, POWERSGD, PROGRAMS, Program
from gckernels.sync.programs.stages import Resource, StageKind, StageSpec
from gckernels.sync.resources.feedback import Feedback
from gckernels.sync.resources.lanes import DeviceLanes
from gckernels.sync.resources.memory_spaces import Places
from gckernels.sync.resources.stage import Stage

ROUNDS, WARM_UP, CALLS = 60, 5, 20
IN_FLIGHT = (1, 8)  # messages that are submitted before the first is waited for
EMPTY = (1, 3, 5)  # stages of the empty messages
RANKS = 2
SHAPES = ((64, 64), (64,), (64, 64), (64,))  # shapes of a message
REAL = (
    ("Identity", "allreduce"),
    ("Cast16", "encoded_allreduce"),
    ("BlockQuant", "allgather"),
    ("BlockQuant", "alltoall"),
    ("PowerSGD(rank=4)", "powersgd"),
)
PHASES = 2


# -------------------------------------------------------------------- messages


def nothing() -> None:
    """The work of an empty stage."""


def empty_messages(stages: int, count: int, work: Callable[[], object] = nothing) -> list[Message]:
    """Messages whose stages compute and communicate in turn, and run ``work``."""
    specs = [
        StageSpec(StageKind.COLLECTIVE, "AllGather", index // 2, Resource.COMMUNICATE, index, index + 1)
        if index % 2
        else StageSpec(StageKind.ENCODE, "Encode", index // 2, Resource.COMPUTE, index, index + 1)
        for index in range(stages)
    ]
    messages = []
    for number in range(count):
        message = Message()
        message.keys, message.sent_nbytes = (f"p{number}",), 0.0
        message.stages = [Stage(spec, work) for spec in specs]
        messages.append(message)
    return messages


def real_messages(spec: str, program: Program, count: int) -> list[Message]:
    """Messages of small units."""
    communicators: Any = DryCommunicators(0, Topology(RANKS), Places.of(CPU))
    feedback, seeds = Feedback(communicators.places), Seeds(0, communicators.places)
    messages: list[Message] = []
    for number in range(count):
        units = []
        for index, shape in enumerate(SHAPES):
            method = gckernels.from_spec(spec if len(shape) > 1 else "Identity").fit(shape)
            plan = UnitPlan(f"p{number}.{index}", math.prod(shape), method, program, feedback=len(shape) > 1)
            units.append(Unit(plan, torch.randn(plan.numel)))
        if program == ALLREDUCE:
            grad = torch.cat([unit.grad for unit in units])
            messages.append(DenseMessage(grad, [unit.plan.key for unit in units], communicators))
        elif program == POWERSGD:
            messages.append(LowRankMessage(units, communicators, feedback, seeds))
        else:
            messages.append(EncodedMessage(units, communicators, feedback, seeds))
    return messages


# -------------------------------------------------------------------- arms


class Calls:
    """The works one after the other, in the calling thread."""

    def submit(self, messages: Sequence[Message], done: Callable[[], None]) -> None:
        for message in messages:
            for stage in message.stages:
                stage.work()
            done()

    def close(self) -> None:
        """Nothing to end."""


class Threads:
    """Threads, each of which calls what it finds in its queue.

    One does all stages of a message. With several, each does one stage and hands the message over to the next thread.
    """

    def __init__(self, count: int) -> None:
        self._queues: list[queue.SimpleQueue[Callable[[], None] | None]] = [queue.SimpleQueue() for _ in range(count)]
        self._threads = [threading.Thread(target=self._run, args=(each,), daemon=True) for each in self._queues]
        for thread in self._threads:
            thread.start()

    def _run(self, calls: queue.SimpleQueue[Callable[[], None] | None]) -> None:
        while (call := calls.get()) is not None:
            call()

    def submit(self, messages: Sequence[Message], done: Callable[[], None]) -> None:
        for message in messages:
            stages = message.stages
            self._hand_over([stages] if len(self._queues) == 1 else [[stage] for stage in stages], 0, done)

    def _hand_over(self, parts: Sequence[Sequence[Stage]], index: int, done: Callable[[], None]) -> None:
        def run() -> None:
            for stage in parts[index]:
                stage.work()
            if index + 1 == len(parts):
                done()
            else:
                self._hand_over(parts, index + 1, done)

        self._queues[index].put(run)

    def close(self) -> None:
        for calls, thread in zip(self._queues, self._threads, strict=True):
            calls.put(None)
            thread.join()


class OfEngine:
    """The engine."""

    def __init__(self) -> None:
        self._engine = Engine(DeviceLanes(CPU), PHASES)

    def submit(self, messages: Sequence[Message], done: Callable[[], None]) -> None:
        engine = self._engine
        for message in messages:
            start = engine.lanes.here()
            engine.finish([engine.submit(message, 3, (start,))], done, failed)
        engine.lanes.end_step()

    def close(self) -> None:
        self._engine.lanes.close()


def failed(error: BaseException) -> None:
    raise AssertionError("a stage has failed") from error


# -------------------------------------------------------------------- measurement


@dataclass(frozen=True)
class Cost:
    """The cost of a message: times in microseconds, and the number of times that a thread has gone to sleep."""

    submit_us: float
    cpu_us: float
    wall_us: float
    sleeps: float


def cost(arm: Any, messages: Sequence[Message], calls: int) -> Cost:
    """The mean cost of a message when all ``messages`` are submitted and then waited for, ``calls`` times."""
    left = 0
    finished = threading.Lock()
    finished.acquire()

    def done() -> None:
        nonlocal left
        left -= 1  # one thread calls
        if left == 0:
            finished.release()

    submit_s = 0.0
    slept = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(calls):
        left = len(messages)
        begin_s = time.thread_time()
        arm.submit(messages, done)
        submit_s += time.thread_time() - begin_s
        finished.acquire()
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    slept = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw - slept
    per_us, per = 1e6 / (calls * len(messages)), 1 / (calls * len(messages))
    return Cost(submit_s * per_us, cpu_s * per_us, wall_s * per_us, slept * per)


def measured(name: str, messages: Sequence[Message], rounds: int) -> Iterator[dict[str, Any]]:
    """The rows of some messages, one for each arm."""
    stages = len(messages[0].stages)
    arms: dict[str, Any] = {
        "calls": Calls(),
        "one thread": Threads(1),
        "a thread per stage": Threads(stages),
        "engine": OfEngine(),
    }
    gc.collect()
    gc.disable()
    calls = {arm: functools.partial(cost, each, messages, CALLS) for arm, each in arms.items()}
    costs = take_turns(calls, rounds, WARM_UP)
    gc.enable()
    for each in arms.values():
        each.close()

    def ratio(arm: str, column: str) -> str:
        pairs = zip(costs[arm], costs["one thread"], strict=True)
        return f"{statistics.median(getattr(a, column) / getattr(b, column) for a, b in pairs):.2f}"

    alone_us = statistics.median(each.cpu_us for each in costs["calls"])
    for arm, found in costs.items():
        medians = {
            column: statistics.median(getattr(each, column) for each in found)
            for column in ("submit_us", "cpu_us", "wall_us", "sleeps")
        }
        yield {
            "message": name,
            "stages": stages,
            "in_flight": len(messages),
            "arm": arm,
            **{column: f"{value:.2f}" for column, value in medians.items()},
            "cpu_us_per_stage": f"{(medians['cpu_us'] - alone_us) / stages:.2f}",
            "cpu_ratio": ratio(arm, "cpu_us"),
            "wall_ratio": ratio(arm, "wall_us"),
        }


def rows(rounds: int) -> Iterator[dict[str, Any]]:
    for in_flight in IN_FLIGHT:
        for stages in EMPTY:
            yield from measured("empty", empty_messages(stages, in_flight), rounds)
        for spec, program in REAL:
            yield from measured(f"{spec}, {program}", real_messages(spec, PROGRAMS[program], in_flight), rounds)


def main() -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--dry", action="store_true", help="write no file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=dist.HashStore())  # type: ignore[attr-defined]
    table = []
    for row in rows(arguments.rounds):
        print(*(f"{value:>18}" if name != "message" else f"{value:28}" for name, value in row.items()), flush=True)
        table.append(row)
    if not arguments.dry:
        print("written:", write_csv("stage_cost", CPU, table))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
