"""The parameters of the last synchronisation, the same on all ranks, from which updates are measured; and fragments of
a model on their way, whose means move them some steps later.

An anchor has at least 32 bits, also that of a parameter with 16. It begins a round as the parameter does; with fewer
bits in the parameter the anchor keeps the rest. So means of small updates add up, and none is measured twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future

from gckernels.devices import is_accelerator

from ...engine.failures import Outcome, wait_for
from ...plans.strides import grad_strides
from ..members import Members
from .optimizer_states import check_optimizer, check_tensors, copied
from .round_buffers import BufferArrival
from .sent_states import SentState, broadcast_tensors, read, written
from .updates_request import Outer


class Anchors:
    """The anchors of a model, and the outer optimizer that moves them.

    Args:
        parameters: the values of the parameters of the model, by name, the same on all ranks.
        outer: makes the outer optimizer.
        device: the memory in which anchors and the state of the outer optimizer lie; that of the parameters if
            ``None``.

    Attributes:
        values: the anchors, by name.
        members: their forms, and references to them.
        outer: the outer optimizer.
    """

    def __init__(
        self, parameters: Mapping[str, torch.Tensor], outer: Outer, device: torch.device | None = None
    ) -> None:
        self.values = {name: _anchor(each, device or each.device) for name, each in parameters.items()}
        self.members = Members(torch.nn.ParameterList(self.values.values()), self.values)
        self.outer = outer(list(self.values.values()))

    def begin(self, name: str, parameter: torch.Tensor) -> torch.Tensor:
        """The value with which a parameter has begun the round, in its own dtype and on its device."""
        return self.values[name].detach().to(parameter)

    @torch.no_grad()
    def move(self, means: Mapping[str, torch.Tensor]) -> None:
        """Let the outer optimizer move some anchors by the means of their updates, which have the sign of gradients.
        It leaves all others alone."""
        for name, mean in means.items():
            self.values[name].grad = mean.detach().to(self.values[name])
        self.outer.step()
        for name in means:
            self.values[name].grad = None

    @torch.no_grad()
    def hand_out(
        self, parameters: Mapping[str, torch.Tensor], sent: Mapping[str, torch.Tensor], mixing: float | None = None
    ) -> None:
        """Replace the values of some parameters by their anchors.

        Args:
            parameters: the values, by name.
            sent: values from before; what steps have changed of these is added to the anchors.
            mixing: the part of its own value that every other parameter keeps.
        """
        for name, values in parameters.items():
            anchor = self.values[name].detach().to(values.device)
            if name in sent:
                anchor = anchor + (values.to(anchor) - sent[name].to(anchor))
            elif mixing is not None:
                anchor = torch.lerp(anchor, values.to(anchor), mixing)
            values.copy_(anchor)

    def outer_written(self) -> tuple[str, list[torch.Tensor]]:
        """The state of the outer optimizer as text, and its tensors.

        Raises:
            TypeError: it has something that cannot be sent.
        """
        return written("outer", self.outer.state_dict())

    def outer_read(self, text: str, own: Sequence[torch.Tensor]) -> SentState:
        """The state of the outer optimizer of another rank, without the values of its tensors.

        Args:
            text: what :meth:`outer_written` has returned there.
            own: the tensors that it has returned here.

        Raises:
            ValueError: it is no state of such an optimizer.
        """
        state, tensors = read("outer", text, sum(each.nbytes for each in self.values.values()))
        check_optimizer("outer", state, self.outer)
        return SentState(state, tensors, own)

    @torch.no_grad()
    def receive(
        self, group: dist.ProcessGroup, device: torch.device, source: int, outer: SentState
    ) -> dict[str, torch.Tensor]:
        """Take the anchors and the state of the outer optimizer of a rank of a group. Collective.

        Args:
            group: the group.
            device: a device whose tensors it can send.
            source: the rank.
            outer: the state of its outer optimizer.

        Returns:
            The anchors from before, by name. Anchors that have stayed the same are missing.
        """
        before = {name: each.detach().clone() for name, each in self.values.items()}
        into = [each.detach() for each in self.values.values()]
        what = "regroup: the parameters of the last round"
        broadcast_tensors(group, device, source, [*before.values()], into, what, [*before])
        self.outer.load_state_dict(outer.received(group, device, source))
        return {name: each for name, each in before.items() if not torch.equal(each, self.values[name])}

    def state_dict(self) -> dict[str, Any]:
        """Copies of the anchors, and the state of the outer optimizer."""
        return {"anchors": copied(self.values), "outer": copied(self.outer.state_dict())}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise a ValueError unless :meth:`load` may be given a state."""
        check_tensors("anchors", state.get("anchors"), self.values)
        check_optimizer("outer", state.get("outer"), self.outer)

    @torch.no_grad()
    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of :meth:`state_dict`."""
        for name, anchor in self.values.items():
            anchor.copy_(state["anchors"][name])
        self.outer.load_state_dict(copied(state["outer"]))


def _anchor(parameter: torch.Tensor, device: torch.device) -> torch.nn.Parameter:
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    is_pinned = device.type == "cpu" and is_accelerator(parameter.device)  # the device copies from there by itself
    strides = grad_strides(parameter)
    values = torch.empty_strided(parameter.shape, strides, dtype=dtype, device=device, pin_memory=is_pinned)
    return torch.nn.Parameter(values.copy_(parameter.detach()))


@dataclass
class Arrival:
    """A fragment on its way.

    Attributes:
        means: its updates, which become their means, by the names of the parameters.
        sent: the parameters as they were sent, if steps that are made meanwhile are to be kept; otherwise nothing.
        left: the number of steps until it arrives.
        futures: the messages that have not ended yet.
        buffers: the buffers that are sent with it, at the end of a round.
    """

    means: dict[str, torch.Tensor]
    sent: dict[str, torch.Tensor]
    left: int
    futures: Sequence[Future[Outcome]] = field(default=(), repr=False)
    buffers: BufferArrival | None = None

    def wait(self) -> None:
        """Wait until the means are there.

        Raises:
            RuntimeError: a message has failed.
        """
        futures, self.futures = self.futures, ()
        wait_for(futures)
        if self.buffers is not None:
            self.buffers.wait()

    def state_dict(self) -> dict[str, Any]:
        """Copies of the means and of the parameters that were sent, and the number of steps until they arrive."""
        self.wait()
        buffers = None if self.buffers is None else self.buffers.state_dict()
        return {"means": copied(self.means), "sent": copied(self.sent), "left": self.left, "buffers": buffers}

    @classmethod
    def read(cls, state: Any, parameters: Mapping[str, torch.Tensor]) -> Arrival:
        """The fragment of a state of :meth:`state_dict`, on the device of some parameters.

        Raises:
            ValueError: it is damaged, or of other parameters.
        """
        means = state.get("means") if isinstance(state, dict) else None
        if not isinstance(means, dict) or type(state.get("left")) is not int or not means.keys() <= parameters.keys():
            raise ValueError("state: arriving must be a dict with the means of parameters of the model")
        expected = {name: parameters[name] for name in means}
        check_tensors("means", means, expected)
        check_tensors("sent", state.get("sent"), expected if state["sent"] else {})
        own = {name: each.to(expected[name].device, copy=True) for name, each in means.items()}
        sent = {name: each.to(expected[name], copy=True) for name, each in state["sent"].items()}
        return cls(own, sent, state["left"])
