"""The state that a runtime keeps between steps: saving, loading, and handing it to the next plan."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from gckernels.devices import synchronize

from ..messages.seeds import Seeds
from ..plans.plan import Plan, UnitPlan
from ..programs.residuals import ENCODINGS
from ..resources.feedback import KINDS, Feedback
from ..resources.memory_spaces import Places
from ..resources.residual import Residual
from ..states.dcp_guard import Refusal
from ..states.layout import residual_sizes
from .engine import Engine

if TYPE_CHECKING:
    from ..states.jobs import Job
    from ..states.parts import ModelPart
    from ..states.unsent import Kept
    from .step_copies import StepCopies

_NOTE = Refusal(b"this state is of one rank; torch.distributed.checkpoint takes what checkpoint() returns instead")


class RuntimeState:
    """The residuals, factors and steps of a :class:`~.runtime.Runtime`, which documents arguments and attributes."""

    def __init__(
        self, plan: Plan, group: dist.ProcessGroup, device: torch.device, seed: int, residual_bits: int
    ) -> None:
        self.plan, self.device = plan, device
        self.group, self.rank, self.world_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.topology = plan.topology_of(self.world_size)
        self.step, self.first_is_dense, self.changed_residuals = 0, True, False
        self.part: ModelPart | None = None
        self._places = Places.of(device)
        self._feedback, self._seeds = Feedback(self._places, residual_bits), Seeds(seed, self._places)
        self._copies: StepCopies | None = None
        self._engine: Engine | None = None
        self._begun: set[str] = set()  # units that have been compressed, the same on all ranks
        self._thrown: set[str] = set()  # units whose last gradient was thrown away

    @property
    def next_step(self) -> int:
        """The number of the next training step, behind those of replayed CUDA graphs, which ``step`` does not count."""
        return self.step + self._seeds.replayed()

    def state_dict(self, device: torch.device | None = None) -> dict[str, Any]:
        """The state of this rank, with which a resumed job continues exactly: tensors, ints, strings, the plan as JSON.

        Every rank saves its own. After a failure, each residual is the one from before or after the failed step.

        Args:
            device: device of the tensors, which are copies; by default that of each residual.
        """
        self.settle()
        self._settle()
        feedback = self._feedback.state_dict(device)
        if self._copies is not None:
            self._copies.unscale(feedback)
        return {
            "note": _NOTE,
            "step": self.next_step,
            "rank": self.rank,
            "world_size": self.world_size,
            "plan": self.plan.to_json(),
            "units": [unit.key for unit in self.plan.units if unit.key in self._begun],
            "feedback": feedback,
        } | ({} if self.part is None else {"part": self.part.entry})

    def read(self, state: dict[str, Any] | list[dict[str, Any]] | tuple[dict[str, Any], ...]) -> Job:
        """The job that has saved what :meth:`state_dict` has returned.

        Args:
            state: the state of the same rank of a job with as many ranks; or a list of the states of all ranks of a
                job of any size, in any order, the same list on all ranks.

        Raises:
            ValueError: a state is damaged, or of another rank or number of ranks, or the list is not of all ranks of
                one job.
        """
        from ..states import parts

        job: Job
        if isinstance(state, list | tuple):
            job = parts.read_states(state, self.plan, self.part)
        else:
            job = parts.read_state(state, self.part, self.rank, self.world_size)
        return job

    def settle(self) -> None:
        """Wait until nothing changes residuals any more, because they are about to be read or replaced. After a normal
        step nothing does; after an exact one, which waits for none, they may still be brought to another scale, and
        after a backward that was broken off messages may be on their way."""
        if self._engine is None:
            return
        if self._engine.lanes.error is not None:
            self._engine.lanes.settle()
        else:
            self._engine.lanes.finish()
            synchronize(self.device)

    def forget(self) -> None:
        """Drop everything that residuals hold, because others will be loaded."""
        self._drop()

    def discard_step(self) -> bool:
        """Let the last step not count. If it has changed residuals, the next step begins with those from before it.
        Without copies of these, everything that residuals hold is dropped.

        Returns:
            Whether something was dropped.
        """
        if not self.changed_residuals:
            return False
        self.changed_residuals = False
        if self._copies is not None:
            self._copies.discard()
            return False
        self._drop()
        return True

    def throw_away(self, keys: Collection[str]) -> None:
        """Let the last step not count for some units. Their residuals become what they were before it, when the next
        step begins; without copies of these, they are dropped. Factors, which all ranks share, stay."""
        if self._copies is not None:
            self._copies.throw_away(keys)
        else:
            self._thrown.update(keys)

    def _thrown_away(self) -> list[Residual]:
        """The residuals of units whose gradients were thrown away, once."""
        keys, self._thrown = self._thrown, set()
        return [residual for kind, key, residual in self._feedback.items() if key in keys and kind in ENCODINGS]

    def _settle(self) -> None:
        for residual in self._thrown_away() if self._thrown else ():
            residual.zero()

    def _drop(self) -> None:
        self._feedback.load_state_dict({kind: {} for kind in KINDS})
        if self._copies is not None:
            self._copies.reset()

    def held(self) -> tuple[list[bool], bool]:
        """For each unit whether this rank holds gradient of it that has not been sent; and whether it would hold that
        of another one if the last step did not count."""
        units, copies = self.plan.units, self._copies
        if self._engine is None:
            return [False] * len(units), False
        self.settle()
        self._settle()
        now = [self._holds(unit, self._feedback.get) for unit in units]
        if copies is None:
            return now, False
        return now, any(not held and self._holds(unit, copies.copy) for unit, held in zip(units, now, strict=True))

    def _holds(self, unit: UnitPlan, kept: Kept) -> bool:
        from ..states.unsent import unsent

        return bool(unit.feedback) and any(
            bool(each.values.any()) for each in unsent(unit, self.topology, self.rank, kept)
        )

    def unsent(self, units: Sequence[UnitPlan], sizes: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """The part of this rank in what has not been sent of some units, as
        :func:`~gckernels.sync.states.unsent.unsent_by_parameter` returns it."""
        from ..states.unsent import unsent_by_parameter

        state = self.state_dict(self.device)["feedback"]
        kept: Kept = lambda kind, key: state[kind].get(key)
        return unsent_by_parameter(units, self.topology, self.rank, kept, sizes)

    def follow(self, other: RuntimeState) -> None:
        """Continue where the runtime of another plan, which has sent everything, ends."""
        self.step, self.first_is_dense = other.next_step, other.first_is_dense
        if self._engine is None or not other._begun:
            return
        from ..states.unsent import carried

        plans, feedback = (other.plan, self.plan), other.state_dict()["feedback"]
        keys, states = carried(*plans, self.world_size, self.rank, feedback)
        self._feedback.load_state_dict(states)
        self._begun = keys & other._begun

    def take_over(self, job: Job) -> None:
        """Continue from the saved states of a job.

        With the same program and number of ranks as before, each rank gets its own residual of a unit back. Otherwise
        residuals are redistributed so that the total unsent gradient is preserved
        (:mod:`~gckernels.sync.states.resharding`). A job of one rank has no residuals, and warns if it drops any.

        Raises:
            ValueError: they are of a plan with other units or compressors. Nothing has been changed.
        """
        from ..states import resharding

        self._settle()
        feedback = resharding.reshard(job, self.plan, self.topology, self.rank)
        if self._engine is None:
            if job.has_unsent:
                warnings.warn(
                    "gckernels: a job of one rank does not compress and has no residuals; those of the "
                    f"{job.topology.world_size} ranks of the saved job are dropped",
                    stacklevel=3,
                )
            feedback = {kind: {} for kind in KINDS}
        self._feedback.load_state_dict(feedback, residual_sizes(self.plan, self.topology, self.rank))
        self.changed_residuals = False
        if self._copies is not None:
            self._copies.reset()
        # units that were compressed before keep their residuals, of zeros, and messages that write these
        self._begun = set() if self._engine is None else self._begun.union(job.units)
        self.step = job.step
