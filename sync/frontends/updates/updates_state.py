"""The state of averaged updates on one rank: what it is between steps, saving, and loading."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from ...communication.agreement import named
from ...plans.arguments import plain_name
from ...plans.plan import Plan
from ..frontend import UPDATES, ModelFrontend
from ..members import Members
from ..module.buckets import BROADCAST_NBYTES
from ..module.module_checks import averaged_of
from .anchors import Anchors, Arrival
from .lineage import Lineage
from .optimizer_states import check_optimizers, check_tensors, copied, mean_of
from .optimizer_steps import OptimizerSteps
from .round_buffers import RoundBuffers
from .site_parameters import own_parameters, reshard, values_of, with_elements
from .step_scales import StepScales
from .updates_request import UpdatesRequest


class UpdatesState(ModelFrontend):
    """The anchors of a model, the position in its rounds, and what is on its way. Construction is collective.
    Parameters and buffers of the model become those of rank 0.

    :class:`~.updates_frontend.UpdatesFrontend` documents the arguments.
    """

    averaged: ClassVar[str] = UPDATES
    request: UpdatesRequest

    def __init__(self, model: torch.nn.Module, plan: Plan, request: UpdatesRequest) -> None:
        super().__init__(model, plan, request)
        left_out = request.left_out
        self._members = Members(model, averaged_of(model, left_out), left_out)
        values = {name: values_of(each) for name, each in own_parameters(model, left_out).items()}
        buffers = [each.detach() for name, each in model.named_buffers() if plain_name(name) not in left_out]
        states = [*values.values(), *buffers]
        with named(self.group, "attach: the broadcast of parameters", [*values]):
            dist._broadcast_coalesced(self.group, states, BROADCAST_NBYTES, 0)  # type: ignore[attr-defined]
        self._anchors = Anchors(values, request.outer, request.anchors_on)
        self._steps = OptimizerSteps(
            request.optimizers, request.scalers, self._members, self._before_step, self._after_step
        )
        self._round_buffers = RoundBuffers(model, left_out, self.device)
        self._begun, self._taken = 0, 0  # the steps before the round that runs, and those of that round
        self._is_away = False  # whether this rank averages with nobody
        self._arriving: Arrival | None = None
        self._lineage = Lineage()
        self._scales: StepScales | None = None
        self._has_loaded = False
        self._lent: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # in shared(), what is exchanged
        self._moved = {*values}  # parameters trained since the last mean, or that may differ from anchors otherwise

    def _before_step(self, number: int) -> None:
        """Called before each step of an optimizer, with its number."""

    def _after_step(self, number: int, ends: bool) -> None:
        """Called after each step of an optimizer, with its number and whether a step of the training ends."""

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return with_elements(self._members.registered())

    def _values(self) -> dict[str, torch.Tensor]:
        """The values of the parameters that this rank has, by name."""
        return {name: values_of(each) for name, each in self.parameters().items()}

    @torch.no_grad()
    def begin_anew(self) -> None:
        """Begin with the parameters and averaged buffers of rank 0, which the model has loaded before its first step.
        Collective."""
        values, buffers = self._values(), self._round_buffers.values()
        with named(self.group, "the broadcast of loaded parameters", [*values]):
            every = [*values.values(), *buffers.values()]
            dist._broadcast_coalesced(self.group, every, BROADCAST_NBYTES, 0)  # type: ignore[attr-defined]
        for name, anchor in self._anchors.values.items():
            anchor.copy_(values[name])
        self._round_buffers.begin()
        self._begun, self._taken, self._has_loaded = 0, 0, False
        self._steps.begun.clear()

    # ---------------------------------------------------------------- parameters in common

    @property
    def is_inside(self) -> bool:
        """Whether the parameters of this rank may differ from those of others now."""
        is_between = not self._taken and not self._steps.begun and self._arriving is None
        return not is_between or self._is_away or self.request.schedule.fragments > 1

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """A context in which parameters and averaged buffers have the values of the last synchronisation.

        Raises:
            RuntimeError: an optimizer makes a step inside.
        """
        if self._lent is not None or not self.is_open or not self.is_inside:
            yield
            return
        values, buffers = self._values(), self._round_buffers.values()
        common = {name: self._anchors.begin(name, each) for name, each in values.items()}
        common |= {name: each for name, each in self._round_buffers.before.items() if name in buffers}
        values |= buffers
        self._lent = [(values[name], each.clone()) for name, each in common.items()]
        self._swap()
        try:
            yield
        finally:
            self._swap()
            self._lent = None

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange the values that the model has in :meth:`shared` and its own ones."""
        for values, others in self._lent or ():
            before = values.clone()
            values.copy_(others)
            others.copy_(before)
        reshard(self.modules)

    # ---------------------------------------------------------------- checkpoints

    def settle(self) -> None:
        if self._arriving is not None:
            self._arriving.wait()
        super().settle()

    def state_dict(self) -> dict[str, Any]:
        """The anchors and the outer optimizer, the optimizers of this rank, the position in the round, and parameters
        that are not those of the anchors."""
        if self._lent is None:
            return self._state_dict()
        self._swap()
        try:
            return self._state_dict()
        finally:
            self._swap()

    def _state_dict(self) -> dict[str, Any]:
        arriving = None if self._arriving is None else self._arriving.state_dict()
        own: dict[str, Any] = {"begun": self._begun, "taken": self._taken, "arriving": arriving}
        values = self._values()
        if not self.is_inside:  # some that are frozen may
            begins = {name: self._anchors.begin(name, each) for name, each in values.items()}
            values = {name: each for name, each in values.items() if not torch.equal(begins[name], each)}
        own["parameters"] = copied(values)
        own["optimizers"] = [copied(each.state_dict()) for each in self.request.optimizers]
        own["stepped"] = sorted(self._steps.begun)
        own["scales"] = None if self._scales is None else self._scales.state_dict()
        own["buffers"] = self._round_buffers.state_dict()
        own |= {"lineage": self._lineage.state_dict(), "away": self._is_away}
        return {UPDATES: own | self._anchors.state_dict()}

    def read(self, states: Sequence[Mapping[str, Any]]) -> Callable[[], None]:
        parameters, optimizers = self._values(), self.request.optimizers
        found: dict[int, Any] = {state["rank"]: state.get(UPDATES) for state in states}
        for rank, saved in found.items():
            counts = [saved.get(name) for name in ("begun", "taken")] if isinstance(saved, dict) else [None]
            if not all(type(count) is int and count >= 0 for count in counts):
                raise ValueError(f"state: of rank {rank}: {UPDATES} must be a dict, as Updates have it")
            self._anchors.check(saved)
            self._round_buffers.check(saved.get("buffers"))
            check_optimizers("optimizers", saved.get("optimizers"), optimizers)
            stepped = saved.get("stepped")
            numbers = range(len(optimizers))
            if not isinstance(stepped, list) or not all(type(each) is int and each in numbers for each in stepped):
                raise ValueError(f"state: stepped must be a list of numbers of optimizers, got {stepped!r:.60}")
            given = saved.get("parameters")
            may_be_less = isinstance(given, dict) and given.keys() <= parameters.keys()
            differ = saved["taken"] or stepped or saved.get("arriving") is not None or not may_be_less
            check_tensors("parameters", given, parameters if differ else {name: parameters[name] for name in given})
        each = [{**found[rank]} for rank in sorted(found)]
        for saved in each:  # parameters that are as their anchors are not in it
            saved["parameters"] = {name: saved["anchors"][name] for name in parameters} | saved["parameters"]
        if len({(saved["begun"], saved["taken"], *saved["stepped"]) for saved in each}) > 1:
            raise ValueError("states: the ranks are not at the same step of a round")
        is_same = len(states) == 1 or len(states) == self.runtime.world_size
        own = each[sorted(found).index(self.rank)] if self.rank in found else each[0]
        one = own if is_same else mean_of(each)
        arriving = None
        if (on_its_way := one.get("arriving")) is not None:
            arriving = Arrival.read(on_its_way, parameters)
            arriving.buffers = self._round_buffers.read(on_its_way.get("buffers"))

        @torch.no_grad()
        def take() -> None:
            self._anchors.load(one)
            self._round_buffers.load(one["buffers"])
            for optimizer, state in zip(optimizers, one["optimizers"], strict=True):
                optimizer.load_state_dict(copied(state))
            for name, parameter in parameters.items():
                parameter.copy_(one["parameters"][name])
            self._begun, self._taken, self._steps.begun = one["begun"], one["taken"], {*one["stepped"]}
            self._arriving, self._has_loaded = arriving, False
            self._lineage.load(one["lineage"])
            self._is_away, self._moved = bool(one["away"]), {*parameters}
            if self._scales is not None:
                self._scales.load(one.get("scales"))

        return take
