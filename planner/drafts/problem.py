"""Problems: everything that the choice of a plan depends on."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch

from gckernels.codec import GRAD_DTYPES, Codec
from gckernels.compressor import Compressor
from gckernels.ops import Identity
from gckernels.sync.accuracy.accuracy import unfitted
from gckernels.sync.plans.plan import Frontend, Plan
from gckernels.sync.plans.units import takes_shards
from gckernels.sync.programs.named import default_program
from gckernels.sync.programs.spans import MEAN
from gckernels.sync.programs.steps import Place, Program
from gckernels.sync.programs.topology import Topology
from gckernels.sync.traces.model_trace import ModelTrace

from ..machines.machine import Machine
from ..timeline.pricing import Pricer
from ..timeline.timeline import Timeline, timeline
from .rounds import UpdateRounds

PREDICTED_SHARE = 0.2
"""The share of a step that counts as predicted at least: what runs beside a backward makes it longer, by a predicted
time, even where nothing waits for communication."""


class ProblemError(ValueError):
    """Raised by a policy that has no plan for a problem."""


@dataclass(frozen=True)
class Problem:
    """A model's trace, a machine, and the compressors that each tensor may use. A policy turns it into a plan.

    Tensors are numbered as in the trace, in the order in which they are ready.

    Raises:
        TypeError, ValueError: an argument is not valid; the message names it.
    """

    trace: ModelTrace  # a training step without compression; with rounds their trace, in which a step is a round
    pricer: Pricer  # the prices of messages on the machine
    frontend: Frontend
    """The kind of model that the plan is for. The launches of DDP and FSDP2 are the buckets of the trace, in which a
    plan may only choose messages. The launches of a bare module are the plan's. With replicas of shards the trace is
    that of the shards of a rank."""
    allowed: Mapping[str, tuple[Compressor, ...]] = field(default_factory=dict)
    """For each tensor by name, the compressors that it may use, fitted to its shape or not; a tensor that is missing is
    sent exactly."""
    places: tuple[Place, ...] = (Place.DEVICE,)  # where stages may compute; always the device, and perhaps the host
    weights: Codec | None = None
    """Encodes the parameters that FSDP2 gathers, under all plans that compress something; ``None`` if they are sent as
    they are."""
    rounds: UpdateRounds | None = None
    """The rounds of a bare module whose updates are averaged; ``None`` if its gradients are."""
    found: dict[str, Found] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The plans that policies have found so far, by name."""
    judged_drafts: dict[object, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """The predicted seconds of the drafts that have been judged."""
    # plans by identity: comparing plans takes as long as judging them
    _judged: dict[int, tuple[Plan, float]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _fitted: dict[tuple[int, Compressor | None], Compressor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if not isinstance(self.frontend, Frontend):
            raise TypeError(f"Problem: frontend must be a Frontend, got {self.frontend!r}")
        if self.rounds is not None and self.frontend.traits.is_wrapped:
            raise ValueError(f"Problem: rounds are for bare modules, got {self.frontend.value}")
        sharding = self.pricer.sharding
        if (None if sharding is None else sharding.inside is None) is not self.frontend.traits.shards_on_all:
            raise ValueError(f"Problem: the pricer has the shards of another kind of model than {self.frontend.value}")
        _check_trace(self.trace, self.frontend, gathers=sharding is not None and sharding.inside != 1)
        if unknown := [name for name in self.allowed if name not in self.trace.by_name]:
            raise ValueError(f"Problem: allowed has {unknown[0]!r}, which the trace has not")
        if Place.DEVICE not in self.places or not set(self.places) <= set(Place):
            raise ValueError(f"Problem: places must be the device, or device and host, got {self.places!r}")

    @property
    def step(self) -> ModelTrace:
        """The trace of a training step."""
        return self.trace if self.rounds is None else self.rounds.step

    def on(self, step: ModelTrace, pricer: Pricer) -> Problem:
        """The problem with another trace of a training step, and other prices."""
        rounds = None if self.rounds is None else replace(self.rounds, step=step)
        return replace(self, trace=step if rounds is None else rounds.trace, pricer=pricer, rounds=rounds)

    @property
    def machine(self) -> Machine:
        """The machine of the pricer."""
        return self.pricer.machine

    @property
    def topology(self) -> Topology:
        """The topology of the machine."""
        return self.machine.topology

    @functools.cached_property
    def numbers(self) -> Mapping[str, int]:
        """The numbers of the tensors by name."""
        return {tensor.name: number for number, tensor in enumerate(self.trace.tensors)}

    @functools.cached_property
    def compressors(self) -> tuple[Compressor, ...]:
        """All compressors that any tensor may use, not fitted to shapes, without repetition."""
        used = (methods for name, methods in self.allowed.items() if name in self._compressible)
        found = dict.fromkeys(unfitted(each) for methods in used for each in methods)
        return tuple(each for each in found if self.frontend.span() == MEAN or takes_shards(each))

    @functools.cached_property
    def _compressible(self) -> Mapping[str, int]:
        """The tensors that have elements, of a dtype that programs with encodings take: their numbers, by name."""
        tensors = self.trace.tensors
        return {name: at for name, at in self.numbers.items() if tensors[at].numel and self.encodable(at)}

    @functools.cached_property
    def users(self) -> Mapping[Compressor | None, frozenset[int]]:
        """For each compressor, not fitted to shapes, the tensors that may use it; for ``None`` those that programs with
        encodings take."""
        tensors = self.trace.tensors
        encodable = frozenset(number for number in range(len(tensors)) if self.encodable(number))
        users: dict[Compressor | None, set[int]] = {compressor: set() for compressor in self.compressors}
        for name, number in self._compressible.items():
            for compressor in map(unfitted, self.allowed.get(name, ())):
                if compressor in users:
                    users[compressor].add(number)
        return {None: encodable} | {compressor: frozenset(each) for compressor, each in users.items()}

    def may_use(self, tensor: int, compressor: Compressor) -> bool:
        """Whether a tensor may be compressed with a compressor."""
        return tensor in self.users.get(compressor, ())

    @functools.cached_property
    def buckets(self) -> tuple[tuple[int, ...], ...]:
        """The buckets of DDP or FSDP2 as numbers of tensors, first launched first; empty for a bare module."""
        if self.frontend.plans_launches:
            return ()
        return tuple(tuple(self.numbers[name] for name in bucket) for bucket in self.trace.buckets)

    @property
    def is_sharded(self) -> bool:
        """Whether the model is one of FSDP2, whose parameters are neither parted nor merged."""
        return self.frontend.traits.shards_on_all is not None

    def default_program(self, compressor: Compressor) -> Program:
        """The program for tensors with a compressor of which nothing else is known."""
        return default_program(compressor, self.topology.world_size, self.frontend.span())

    def encodable(self, tensor: int) -> bool:
        """Whether a tensor has a dtype that programs with encodings take; any other is averaged in place."""
        return self.trace.tensors[tensor].dtype in GRAD_DTYPES

    def fitted(self, tensor: int, compressor: Compressor | None) -> Compressor:
        """The method of a tensor in a message with ``compressor``, fitted to its shape.

        It is :class:`~gckernels.Identity` if the tensor may not use the compressor, or if that is ``None``.
        """
        known = self._fitted
        if (tensor, compressor) not in known:
            known[tensor, compressor] = Identity()
            if compressor is not None and tensor in self.users.get(compressor, ()):
                traced = self.trace.tensors[tensor]
                known[tensor, compressor] = compressor.fit(traced.shape or (traced.numel,))
        return known[tensor, compressor]

    def timeline(self, plan: Plan) -> Timeline:
        """The predicted timeline of a step with a plan."""
        return timeline(plan, self.trace, self.pricer, self.frontend)

    def step_s(self, plan: Plan) -> float:
        """The predicted seconds of a step with a plan. Results are kept."""
        known = self._judged.get(id(plan))
        if known is None:
            known = self._judged[id(plan)] = (plan, self.timeline(plan).step_s)
        return known[1]

    def margin(self, predicted: Timeline) -> float:
        """The relative error that a prediction is expected to have: the error of the machine, or of the prices of
        its own stages if these are worse."""
        return max(self.machine.margin, predicted.error)

    def is_gain(self, step_s: float, none_s: float, margin: float = 0.0) -> bool:
        """Whether a plan saves more than predictions may be wrong by.

        The trace has measured forward, backward and the optimizer, which all plans have in common. Only what a step
        takes on top of them is predicted, from prices with an error.

        Args:
            step_s: the predicted seconds of a step with the plan.
            none_s: the predicted seconds of a step with the plan that it is compared with, such as that of ``none``.
            margin: the relative error of both predictions, if it is larger than that of the machine.
        """
        predicted_s = max(none_s - self.trace.computing_s, none_s * PREDICTED_SHARE)
        return none_s - step_s > max(self.machine.margin, margin) * predicted_s

    def dtype(self, tensor: int) -> torch.dtype:
        """The dtype of a tensor."""
        return self.trace.tensors[tensor].dtype


@dataclass(frozen=True)
class Found:
    """A plan that a policy has found."""

    plan: Plan
    search_s: float  # how long the policy has searched, in seconds


Policy: TypeAlias = Callable[[Problem], Plan]
"""A function that chooses a plan. It neither measures nor communicates."""


def _check_trace(trace: ModelTrace, frontend: Frontend, gathers: bool) -> None:
    names = [tensor.name for tensor in trace.tensors]
    if not names:
        raise ValueError("Problem: the trace has no tensors")
    if len(set(names)) < len(names):
        raise ValueError("Problem: two tensors of the trace have the same name")
    if frontend.plans_launches:
        return
    held = [name for bucket in trace.buckets for name in bucket]
    if gathers and not trace.gathers:
        raise ValueError("Problem: the trace has no gathers of parameters; record it from a model of fully_shard")
    if not held:
        raise ValueError("Problem: the trace has no buckets, which are DDP's launches; record it from a DDP model")
    if sorted(held) != sorted(names) or not all(trace.buckets):
        raise ValueError("Problem: the buckets of the trace must have each of its tensors once")
    for bucket in trace.buckets:
        if len(mixed := sorted({str(trace.by_name[name].dtype).removeprefix("torch.") for name in bucket})) > 1:
            several = f"the bucket of {bucket[0]!r} has tensors of {' and '.join(mixed)}"
            raise ValueError(f"Problem: {several}, and what is sent as one vector has one dtype")


def shards_of(trace: ModelTrace, ranks: int) -> ModelTrace:
    """The trace of the shards that one of ``ranks`` ranks has, with the largest share of each tensor's rows."""
    whole = (each.shape or (each.numel,) for each in trace.tensors)
    shapes = ((-(-rows // ranks), *others) for rows, *others in whole)
    pairs = zip(trace.tensors, shapes, strict=True)
    tensors = (replace(each, numel=math.prod(shape), shape=shape) for each, shape in pairs)
    gathers = (replace(each, frozen_numel=-(-each.frozen_numel // ranks)) for each in trace.gathers)
    return replace(trace, tensors=tuple(tensors), gathers=tuple(gathers))
