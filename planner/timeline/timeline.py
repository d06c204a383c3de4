"""The predicted timeline of a training step: what runs when, and what is busy.

:func:`timeline` submits the messages of a plan to virtual lanes, as the engine submits them to real ones, while
backward computes gradients. Lanes give stages their order, shared resources their speed (:mod:`~.simulator`). Whatever
is compared, promised or printed comes from here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from gckernels.sync.plans.grouping import MessageSpec
from gckernels.sync.plans.plan import Frontend, Plan
from gckernels.sync.programs.lanes import SHARD_BUFFERS, LaneKey, route_of, submit_stages
from gckernels.sync.programs.stages import MessageKind, Resource, StageSpec
from gckernels.sync.programs.steps import Level
from gckernels.sync.traces.model_trace import ModelTrace

from ..machines.machine import Shared
from .launches import BucketLaunch, has_no_hook, launches_of, messages_of, phases_of
from .priced_stages import PricedStage, imbalance, need_elsewhere, need_here, need_without_hook
from .pricing import Pricer
from .shard_lanes import GatherTasks, ShardLanes
from .virtual_lanes import SUBMITTER, Run, Submitted, Utilisation, VirtualLanes, utilisation_of


class Origin(NamedTuple):
    """The place of a stage in the step."""

    launch: int  # the number of its launch
    message: int  # the number of its message in the step
    keys: tuple[str, ...]  # the names of the message's units


@dataclass(frozen=True)
class TimedStage:
    """A stage and its predicted times, in seconds from the start of the step."""

    launch: int  # the number of its launch
    message: int  # the number of its message in the step
    keys: tuple[str, ...]  # the names of the message's units
    spec: StageSpec
    lane: LaneKey
    start_s: float  # when it begins
    end_s: float  # when it ends
    at_once: bool  # whether the submitting thread starts it, beside the others of the lane


@dataclass(frozen=True)
class Timeline:
    """A predicted training step. All times are in seconds, those of events from the start of the step."""

    step_s: float
    forward_s: float  # forward, with its waiting for parameters of FSDP2, and nothing else that delays it
    backward_s: float
    """Backward, with everything that makes it longer: what shares its cores or its device, submission, hooks, waiting
    for parameters of FSDP2."""
    optimizer_s: float  # the optimizer, which begins when all gradients are averaged
    exposed_s: float  # from the end of backward until the optimizer begins, waiting for launches and copying gradients
    launches: tuple[BucketLaunch, ...] = field(repr=False)  # the launches, in order
    phases: int  # the number of collectives of the longest program, on which the lane depends that waits for launches
    capacities: Mapping[Shared, float] = field(repr=False)  # the capacities of shared resources
    run: Run = field(repr=False, compare=False)  # the simulation
    submitted: Sequence[Submitted[PricedStage]] = field(repr=False, compare=False)
    """All stages of all messages, in the order of submission, each with its task in the simulation."""
    origins: Sequence[Origin] = field(repr=False, compare=False)  # the origin of each of them
    gathers: Sequence[GatherTasks] = field(default=(), repr=False, compare=False)
    """The gathers of parameters of FSDP2, in the order in which they are asked for."""

    @functools.cached_property
    def stages(self) -> tuple[TimedStage, ...]:
        """All stages of all messages, in the order of submission."""
        times = self.run.times
        return tuple(
            TimedStage(*origin, stage.spec, lane, times.start_s[task], times.end_s[task], at_once)
            for origin, (stage, lane, task, at_once) in zip(self.origins, self.submitted, strict=True)
        )

    @functools.cached_property
    def backward(self) -> tuple[tuple[float, float], ...]:
        """The parts of backward between launches, each with what submits the launch before it, as starts and ends."""
        first_s, last_s = self.forward_s, self.forward_s + self.backward_s
        run = zip(self.run.tasks, self.run.times.start_s, self.run.times.end_s, strict=True)
        times = [(start_s, end_s) for task, start_s, end_s in run if task.lane == SUBMITTER]
        # sums of times are rounded
        return tuple(
            (start_s, end_s) for start_s, end_s in times if start_s < end_s and first_s < (start_s + end_s) / 2 < last_s
        )

    @functools.cached_property
    def busy_s(self) -> Mapping[Shared, float]:
        """For every shared resource that is used, the seconds of work that it does in the step. It can do as many per
        second as it has capacity."""
        busy_s: dict[Shared, float] = {}
        for task in self.run.tasks:
            for shared, share in task.need.shares.items():
                busy_s[shared] = busy_s.get(shared, 0.0) + share * task.need.loaded_s
        return busy_s

    @functools.cached_property
    def error(self) -> float:
        """The relative error of the prices of all stages together; 0 if only the margin of the machine is known."""
        prices = [submitted.stage.price for submitted in self.submitted]
        unsure_s = sum(price.unsure_s.item(0) for price in prices if price.unsure_s is not None)
        return unsure_s / total_s if (total_s := sum(price.alone_s.item(0) for price in prices)) else 0.0

    @functools.cached_property
    def utilisation(self) -> Mapping[Shared, Utilisation]:
        """The load over time of every shared resource that is used."""
        return utilisation_of(self.run, self.capacities)


def timeline(plan: Plan, trace: ModelTrace, pricer: Pricer, frontend: Frontend) -> Timeline:
    """The predicted timeline of a training step.

    It is that of the rank with the most work (:func:`~.priced_stages.imbalance`). Where other ranks do something alone,
    as those of another root, their work delays the message, and loads only the links that they share with this rank.

    Args:
        trace: a step of the model without compression.
        pricer: the prices of messages on a machine.
        frontend: what executes the plan.

    Raises:
        PlanError: the plan does not fit the trace.
        MachineError: the machine lacks a price.
    """
    return _Step(plan, trace, pricer, frontend).timeline()


class _Step:
    """A step to predict; the arguments are those of :func:`timeline`."""

    def __init__(self, plan: Plan, trace: ModelTrace, pricer: Pricer, frontend: Frontend) -> None:
        machine = pricer.machine
        self._trace, self._frontend, self._machine = trace, frontend, machine
        self._launches, is_alone = launches_of(plan, trace, frontend), machine.topology.world_size == 1
        specs = [() if is_alone else messages_of(launch, plan, frontend) for launch in self._launches]
        both = [(spec, launch.dtype) for launch, each in zip(self._launches, specs, strict=True) for spec in each]
        priced = iter(pricer.messages(both, plan.span if frontend.gathers else None))
        self._messages = [tuple((spec, next(priced)) for spec in each) for each in specs]
        everything = itertools.chain.from_iterable(self._messages)
        rooted = ((stages, spec.units[0].plan.root) for spec, stages in everything)
        self._rank, self._uneven = imbalance(rooted, trace, machine)
        self._without_hook, self._phases = has_no_hook(plan, frontend), phases_of(unit.program for unit in plan.units)
        computing = {machine.computes_on: min(1.0, machine.capacities.get(machine.computes_on, 1.0))}
        self._lanes = VirtualLanes[PricedStage](
            functools.partial(need_without_hook, machine.overheads)
            if self._without_hook
            else functools.partial(need_here, self._uneven),
            at_once=1,  # the price of an average is that in a train, with those before and behind it on their way
            computes=computing,
            submits=computing if machine.computes_on == Shared.CORES else {},
        )
        self._origins: list[Origin] = []
        self._ends: list[list[int]] = []  # the tokens of the ends of messages, by launch
        self._sent = 0  # messages
        self._shards: ShardLanes | None = None
        if pricer.sharding is not None and not is_alone:
            self._shards = ShardLanes(pricer.sharding, self._lanes, trace, pricer, plan)

    def timeline(self) -> Timeline:
        """The timeline of the step."""
        lanes, trace = self._lanes, self._trace
        forward, now_s = -1, -trace.forward_s  # times are from the start of backward
        for at_s, _, happen in sorted(self._events(), key=lambda event: event[:2]):
            lanes.compute(max(at_s - now_s, 0.0))
            now_s = max(at_s, now_s)
            if happen is None:
                forward = lanes.here()
            else:
                happen()
        lanes.compute(max(trace.backward_s - now_s, 0.0))
        backward = lanes.here()
        for launch, tokens in zip(self._launches, self._ends, strict=False):
            lanes.wait_for([lanes.here(), *tokens])
            lanes.compute(self._copied_s(launch))
        averaged = lanes.here()
        lanes.compute(trace.optimizer_s)
        step = lanes.here()
        run = lanes.run(self._machine.capacities)
        lanes.close()
        end_s = run.times.end_s
        return Timeline(
            step_s=end_s[step],
            forward_s=end_s[forward],
            backward_s=end_s[backward] - end_s[forward],
            optimizer_s=end_s[step] - end_s[averaged],
            exposed_s=end_s[averaged] - end_s[backward],
            launches=self._launches,
            phases=self._phases,
            capacities=self._machine.capacities,
            run=run,
            submitted=lanes.submitted,
            origins=self._origins,
            gathers=() if self._shards is None else self._shards.gathers,
        )

    def _copied_s(self, launch: BucketLaunch) -> float:
        """The seconds in which DDP copies averaged gradients out of a bucket, one bucket after the other."""
        if not (self._trace.copies_gradients and self._frontend.traits.copies_buckets):
            return 0.0
        nbytes = np.array([float(launch.numel * launch.dtype.itemsize)])
        return float(self._machine.copy(self._machine.computes_on, nbytes).alone_s[0])

    def _events(self) -> Iterator[tuple[float, int, Callable[[], None] | None]]:
        """Everything that happens while the model computes: when, its order at the same time, and what lets it happen.

        Times are seconds from the start of backward. ``None`` is the end of forward.
        """
        yield 0.0, -1, None
        if self._machine.topology.world_size == 1:
            return
        first = len(self._launches)
        for number, launch in enumerate(self._launches):
            yield launch.ready_s, number, functools.partial(self._launch, number)
        for number, gather in enumerate(self._trace.gathers if self._shards is not None else (), first):
            assert self._shards is not None
            asked_s, needed_s = gather.asked_s - self._trace.forward_s, gather.needed_s - self._trace.forward_s
            yield asked_s, number, functools.partial(self._shards.ask, gather)
            yield needed_s, number, functools.partial(self._shards.wait, gather)

    def _launch(self, number: int) -> None:
        """Submit the messages of a launch."""
        overheads, lanes, shards = self._machine.overheads, self._lanes, self._shards
        launch, priced = self._launches[number], self._messages[number]
        lanes.delay(overheads.plain_s if self._without_hook else overheads.hook_s)
        if shards is not None and number >= SHARD_BUFFERS and not self._without_hook:
            shards.wait_for(self._ends[number - SHARD_BUFFERS])
        after = () if shards is None else shards.reduce(launch.numel * launch.dtype.itemsize)
        tokens = []
        for spec, stages in priced:
            tokens.append(self._submit_message(spec, stages, Origin(number, self._sent, spec.keys), after))
            self._sent += 1
        # the submitting thread starts the only message of a launch, so that no lane waits for its end
        is_started_at_once = [spec.kind for spec, _ in priced] == [MessageKind.IN_PLACE]
        if priced and not is_started_at_once:
            lanes.lane(Resource.COMPUTE, self._phases).submit(lambda: None, tokens)
        if shards is not None and shards.blocks and self._without_hook:
            shards.wait_for(tokens)
        self._ends.append(tokens or list(after))

    def _submit_message(
        self, message: MessageSpec, stages: tuple[PricedStage, ...], origin: Origin, after: tuple[int, ...]
    ) -> int:
        """Submit the stages of a message, and return the token of the last one."""
        lanes, uneven, root = self._lanes, self._uneven, message.units[0].plan.root
        for elsewhere, group in itertools.groupby(stages, lambda stage: self._elsewhere(stage, root)):
            part = tuple(group)
            if elsewhere is None:
                self._origins += [origin] * len(part)
                after = (submit_stages(lanes, route_of(lanes, part, message.channel), after),)
            else:
                for stage in part:
                    lane = (elsewhere, stage.lane(message.channel))
                    after = (lanes.elsewhere(lane, need_elsewhere(uneven, stage), after),)
        (token,) = after
        return token

    def _elsewhere(self, stage: PricedStage, root: int) -> tuple[tuple[Level, int], ...] | None:
        """The ranks that take part in a stage, as levels with their index; ``None`` if this rank does, too."""
        rank, topology = self._rank, self._machine.topology
        if rank is None or not stage.roots.ranks:
            return None
        ranks = tuple((level, topology.index(level, root)) for level in stage.roots.ranks)
        return None if all(topology.index(level, rank) == index for level, index in ranks) else ranks
