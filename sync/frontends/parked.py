"""Gradient that plans have left behind because its parameters were not used, until they are used again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.amp import GradScaler

from gckernels.ops import Identity

from ..engine.step_copies import StepCopies
from ..plans.builders import plan_of_parameters
from ..plans.strides import in_memory
from ..programs.residuals import ENCODINGS
from ..resources.feedback import KINDS, Feedback
from ..resources.memory_spaces import Places

_KIND = ENCODINGS[0]


class Parked:
    """The parts of this rank in gradient that was not sent before another plan followed, by parameter.

    The mean of the parts over the ranks is what is missing. A rank adds its part to its own gradient, before that is
    averaged, when a backward uses the parameter. So ranks that use it at different times lose nothing.

    Args:
        parameters: all parameters of the model, by name.
        device: the device of the gradients.
        scaler: the gradient scaler of the training; ``None`` if there is none.
        can_discard: whether steps may be discarded.

    Attributes:
        sizes: the number of elements, in real numbers, of every parameter of which some rank had a part when it was
            parked; the same on all ranks.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        device: torch.device,
        scaler: GradScaler | None,
        can_discard: bool,
    ) -> None:
        self.sizes: dict[str, int] = {}
        self._feedback = Feedback(Places.of(device))
        self._copies: StepCopies | None = None
        if scaler is not None or can_discard:
            whole = plan_of_parameters(parameters, Identity(), 1)
            self._copies = StepCopies(scaler, self._feedback, whole, parameters, device)
        self._has_begun = False  # the step that runs, with copies
        self._delivers, self._has_delivered = False, False  # in the step that runs, and in the last one

    def state_dict(self, device: torch.device | None = None) -> dict[str, torch.Tensor]:
        """The parts of this rank, ``fp32 [numel]``, of gradients that are not scaled. These are copies.

        Args:
            device: the device of the copies; by default that of the gradients.
        """
        state = self._feedback.state_dict(device)
        if self._copies is not None:
            self._copies.unscale(state)
        return state[_KIND]

    def load_state_dict(self, parts: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> None:
        """Replace all parts.

        Args:
            parts: as of :meth:`state_dict`.
            sizes: the numbers of elements of all parameters of which some rank has a part.
        """
        self._feedback.load_state_dict({kind: {} for kind in KINDS} | {_KIND: dict(parts)})
        if self._copies is not None:
            self._copies.reset()
        self.sizes = dict(sizes)
        self._has_begun = self._delivers = self._has_delivered = False

    def park(self, parts: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> None:
        """Keep more parts, beside those that are there. The arguments are those of :meth:`load_state_dict`."""
        known = self.state_dict()
        for name, part in parts.items():
            known[name] = part + known[name] if name in known else part
        self.load_state_dict(known, {**self.sizes, **sizes})

    def nbytes(self) -> int:
        """Bytes of all parts and of their copies on this rank."""
        return self._feedback.nbytes() + (0 if self._copies is None else self._copies.nbytes())

    # ---------------------------------------------------------------- steps

    def deliver(self, name: str, parameter: torch.Tensor) -> None:
        """Add the part of a parameter to its gradient, which has just been accumulated and is averaged next."""
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

    def end_step(self) -> None:
        """Note the end of a step that was averaged."""
        self._begin_step()
        self._has_begun, self._delivers, self._has_delivered = False, False, self._delivers

    def discard_step(self) -> bool:
        """Let the last step not count.

        Returns:
            Whether something of it is lost.
        """
        if self._copies is not None:
            self._copies.discard()
        return self._has_delivered and self._copies is None

    def may_return(self) -> bool:
        """Whether this rank would hold more if the last step did not count."""
        copies = self._copies
        each = ((part, copies.copy(kind, name)) for kind, name, part in self._feedback.items()) if copies else ()
        return any(copy is not None and bool(copy.any()) and not bool(part.any()) for part, copy in each)

    def _begin_step(self) -> None:
        """Follow the scaler, and undo the step before if that does not count, once in each step."""
        if self._copies is not None and not self._has_begun:
            self._has_begun = True
            for _, work in self._copies.begin():
                work()

    def close(self) -> None:
        """Stop watching optimizers."""
        if self._copies is not None:
            self._copies.close()
