"""Gradient that plans have left behind because its parameters were not used, until they are used again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from gckernels.ops import Identity

from ..plans.builders import plan_of_parameters
from ..plans.plan import UnitPlan
from ..plans.strides import in_memory
from ..programs.residuals import ENCODINGS
from ..resources.feedback import KINDS, Feedback
from ..resources.memory_spaces import Places
from .frontend import ModelFrontend
from .listeners import Listeners
from .request import Request

if TYPE_CHECKING:
    from ..engine.step_copies import StepCopies
    from ..states.jobs import Job

_KIND = ENCODINGS[0]


class Parking:
    """The parts of this rank in gradient that was not sent before another plan followed, by parameter.

    The mean of the parts over the ranks is what is missing. A rank adds its part to its own gradient, before that is
    averaged, when a backward uses the parameter. So ranks that use it at different times lose nothing.

    Args:
        frontend: delivers it.
        request: the settings of the attachment.
        listeners: called at the ends of steps.

    Attributes:
        sizes: the number of elements, in real numbers, of every parameter of which some rank had a part when it was
            parked; the same on all ranks.
    """

    def __init__(self, frontend: ModelFrontend, request: Request, listeners: Listeners) -> None:
        self._frontend, self._request, self._listeners = frontend, request, listeners
        self._is_used = False  # something was parked
        self._begin()

    def _begin(self) -> None:
        """Have nothing."""
        self.sizes: Mapping[str, int] = {}
        self._feedback = Feedback(Places.of(self._frontend.device))
        self._copies: StepCopies | None = None
        self._has_begun = False  # the step that runs, with copies
        self._delivers, self._has_delivered = False, False  # in the step that runs, and in the last one

    def park(self, units: Sequence[UnitPlan]) -> None:
        """Keep what the residuals of some units hold, beside what is there, until their parameters are used. The units
        are the same on all ranks."""
        named, numels = {name for unit in units for name in unit.parameters}, self._frontend.numels()
        sizes = {name: numels[name] for name in sorted(named & numels.keys())}
        whole = [unit for unit in units if sizes.keys() >= {*unit.parameters}]  # others have lost a parameter
        parts = self.state_dict()
        for name, part in self._frontend.runtime.unsent(whole, sizes).items():
            parts[name] = part + parts[name] if name in parts else part
        self._load(parts, {**self.sizes, **sizes})

    def nbytes(self) -> int:
        """Bytes of all parts and of their copies on this rank."""
        return self._feedback.nbytes() + (0 if self._copies is None else self._copies.nbytes())

    def close(self) -> None:
        """Keep nothing any more, because synchronisation ends."""
        if self._copies is not None:
            self._copies.close()
        self._begin()

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self, device: torch.device | None = None) -> dict[str, torch.Tensor]:
        """The parts of this rank, ``fp32 [numel]``, of gradients that are not scaled. These are copies.

        Args:
            device: the device of the copies; by default that of the gradients.
        """
        state = self._feedback.state_dict(device)
        if self._copies is not None:
            self._copies.unscale(state)
        return state[_KIND]

    def read(self, job: Job) -> Callable[[], None]:
        """A function that continues from what a saved job has parked.

        Raises:
            ValueError: something is parked of no parameter.
        """
        numels = self._frontend.numels()
        for name, numel in job.parked_sizes.items():
            if numels.get(name) != numel:
                raise ValueError(f"state: parked: the model has no parameter {name} with {numel:,} elements")

        def take() -> None:
            if job.parked_sizes or self._is_used:
                runtime = self._frontend.runtime
                self._load(job.parked_part(runtime.rank, runtime.world_size), job.parked_sizes)

        return take

    def _load(self, parts: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> None:
        """Replace all parts by those of :meth:`state_dict`, for parameters with these numbers of elements."""
        frontend, request = self._frontend, self._request
        if not self._is_used:
            self._is_used = True
            self._listeners.add(self._end_step)
            if (scaler := request.enabled_scaler) is not None or request.can_discard:
                parameters = frontend.parameters()
                whole = plan_of_parameters(parameters, Identity(), 1)
                from ..engine import step_copies

                self._copies = step_copies.StepCopies(scaler, self._feedback, whole, parameters, frontend.device)
        self._feedback.load_state_dict({kind: {} for kind in KINDS} | {_KIND: dict(parts)})
        if self._copies is not None:
            self._copies.reset()
        self.sizes = dict(sizes)
        self._has_begun = self._delivers = self._has_delivered = False
        frontend.deliver_to(sizes)

    # ---------------------------------------------------------------- steps

    def deliver(self, name: str, parameter: torch.Tensor) -> None:
        """Add the part of a parameter to its gradient, which has just been accumulated, if that will be averaged and
        used."""
        frontend = self._frontend
        if not self._is_used or not frontend.averages_now or frontend.runtime.averages_only:
            return
        part, grad = self._feedback.get(_KIND, name), parameter.grad
        if part is None or grad is None:
            return
        self._begin_step()
        with torch.no_grad():
            grad.add_(in_memory(part, parameter))
            part.zero_()
        self._delivers = True
        if self._copies is None:
            self._feedback.drop(_KIND, name)

    def discard_step(self) -> bool:
        """Let the last step not count, and return whether something of it is lost."""
        if self._copies is not None:
            self._copies.discard()
        return self._has_delivered and self._copies is None

    def may_return(self) -> bool:
        """Whether this rank would hold more if the last step did not count."""
        copies = self._copies
        each = ((part, copies.copy(kind, name)) for kind, name, part in self._feedback.items()) if copies else ()
        return any(copy is not None and bool(copy.any()) and not bool(part.tensor.any()) for part, copy in each)

    def _end_step(self) -> None:
        """Note the end of a step that was averaged."""
        self._begin_step()
        self._has_begun, self._delivers, self._has_delivered = False, False, self._delivers

    def _begin_step(self) -> None:
        """Follow the scaler, and undo the step before if that does not count, once in each step."""
        if self._copies is not None and not self._has_begun:
            self._has_begun = True
            for _, work in self._copies.begin():
                work()
