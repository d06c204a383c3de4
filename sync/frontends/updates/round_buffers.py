"""The mean of the buffers that rounds change differently on each rank, such as the running statistics of batch norm.

They are the floating-point buffers that are saved with a model. Ranks send those that were changed in the last round on
any of them, and a flag for each one that says whether it was changed in this one. A buffer that was changed for the
first time is sent a second time, when the flags are there. So constants are never sent, and nothing waits that the
round does not wait for.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ...communication.agreement import named
from ...plans.arguments import plain_name
from .optimizer_states import check_tensors, copied

_MEAN = "the mean of buffers"


@dataclass
class BufferArrival:
    """Buffers on their way.

    Attributes:
        names: the buffers that have been sent.
        sent: their values then, by name.
        vector: their sum over the ranks, and then the number of ranks on which each buffer was changed, and on which it
            cannot be averaged, when ``work`` is done.
        ranks: the number of ranks.
        work: the message; ``None`` if it is done.
        group: the ranks, if there is a message.
    """

    names: Sequence[str]
    sent: dict[str, torch.Tensor]
    vector: torch.Tensor
    ranks: int
    work: Any = field(default=None, repr=False)
    group: dist.ProcessGroup | None = field(default=None, repr=False)

    def wait(self) -> None:
        """Wait until the sum is there."""
        work, self.work = self.work, None
        if work is not None:
            assert self.group is not None
            with named(self.group, _MEAN, self.names):
                work.wait()

    def state_dict(self) -> dict[str, Any]:
        """Copies of everything that has arrived, for :class:`BufferArrival`."""
        sent = {name: each.clone() for name, each in self.sent.items()}
        return {"names": [*self.names], "sent": sent, "vector": self.vector.clone(), "ranks": self.ranks}


class RoundBuffers:
    """The buffers of a model that are averaged with its rounds. It keeps neither them nor the model.

    Args:
        model: the model.
        left_out: the plain names of those that each rank has alone.
        device: a device whose tensors ranks can send.

    Attributes:
        lines: a text for each buffer, the same on all ranks.
        before: the values with which the round has begun, by name.
    """

    def __init__(self, model: torch.nn.Module, left_out: frozenset[str], device: torch.device) -> None:
        self._device, self._places = device, dict[str, tuple[weakref.ref[torch.nn.Module], str]]()
        self._forms = dict[str, tuple[torch.Size, torch.dtype]]()
        for prefix, module in model.named_modules():
            for key, buffer in module._buffers.items():
                name = plain_name(f"{prefix}.{key}" if prefix else key)
                is_saved = key not in module._non_persistent_buffers_set
                if buffer is not None and buffer.is_floating_point() and is_saved and name not in left_out:
                    self._places[name] = weakref.ref(module), key
                    self._forms[name] = buffer.shape, buffer.dtype
        is_double = any(dtype == torch.float64 for _, dtype in self._forms.values())
        self._dtype = torch.float64 if is_double else torch.float32
        self.lines = [f"buffer {name}: {[*shape]} {dtype}" for name, (shape, dtype) in self._forms.items()]
        self.begin()

    def values(self) -> dict[str, torch.Tensor]:
        """The buffers, by name. A buffer that is gone, or has got another shape or dtype, is missing."""
        found = {}
        for name, (reference, key) in self._places.items():
            module = reference()
            buffer = None if module is None else module._buffers.get(key)
            if buffer is not None and (buffer.shape, buffer.dtype) == self._forms[name]:
                found[name] = buffer.detach()
        return found

    def begin(self) -> None:
        """Begin with buffers that are the same on all ranks."""
        self.before = {name: each.clone() for name, each in self.values().items()}
        self._listed: list[str] = []

    def receive(self, group: dist.ProcessGroup, source: int) -> None:
        """Take the buffers of a rank of a group. Collective."""
        if self._places:
            vector = self._vector([*self._places], self.values(), [])
            with named(group, "regroup: the buffers", [*self._places]):
                dist.broadcast(vector, group_src=source, group=group)
            taken = self._means([*self._places], vector, 1)
            for name, each in self.values().items():
                each.copy_(taken[name])
            self.begin()

    def send(self, group: dist.ProcessGroup) -> BufferArrival | None:
        """Send the buffers at the end of a round; ``None`` if there are none. Collective."""
        if not self._places:
            return None
        values = self.values()
        flags = [self._is_new(name, values) for name in self._places]
        flags += [self._truth(name not in values) for name in self._places]
        sent = {name: values[name].clone() for name in self._listed if name in values}
        vector = self._vector(self._listed, sent, flags)
        with named(group, _MEAN, [*self._places]):
            work = dist.all_reduce(vector, group=group, async_op=True)
        return BufferArrival(self._listed, sent, vector, dist.get_world_size(group), work, group)

    def arrive(self, arrival: BufferArrival, group: dist.ProcessGroup) -> None:
        """Replace the buffers by their means, which have arrived, with what has changed since they were sent.
        Collective.

        Without changes since then they are the means. With changes they lie between the means and the own values, so
        that no variance becomes negative.
        """
        is_new, is_gone = (arrival.vector[-2 * len(self._places) :].view(2, -1) > 0).tolist()
        found = zip(self._places, is_new, is_gone, strict=True)
        changed = [name for name, changes, goes in found if changes and not goes]
        values, means = self.values(), self._means(arrival.names, arrival.vector, arrival.ranks)
        if late := [name for name in changed if name not in means]:
            vector = self._vector(late, values, [])
            with named(group, _MEAN, late):
                dist.all_reduce(vector, group=group)
            means |= self._means(late, vector, dist.get_world_size(group))
        for name in changed:
            if name in values:
                own, mean = values[name], means[name].to(values[name])
                sent = arrival.sent.get(name, own).to(own)
                moved = mean + (own - sent)
                own.copy_(moved.clamp(torch.minimum(mean, own), torch.maximum(mean, own)))
                self.before[name] = mean.clone()
        self._listed = changed

    def _is_new(self, name: str, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Whether a buffer is not what it was when the round began, without waiting for a device."""
        if name not in values or name not in self.before:
            return self._truth(True)
        return (self.before[name] != values[name]).any().to(self._device, self._dtype)

    def _truth(self, value: bool) -> torch.Tensor:
        return torch.full((), float(value), dtype=self._dtype, device=self._device)

    def _vector(
        self, names: Sequence[str], values: Mapping[str, torch.Tensor], flags: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Some buffers and flags in one vector. Buffers that are missing are zeros."""
        none = torch.zeros(0, dtype=self._dtype, device=self._device)
        parts = [values[name] if name in values else none.new_zeros(self._forms[name][0]) for name in names]
        return torch.cat([none, *(each.to(none).reshape(-1) for each in (*parts, *flags))])

    def _means(self, names: Sequence[str], vector: torch.Tensor, ranks: int) -> dict[str, torch.Tensor]:
        """The means of some buffers, by name, of which a vector begins with the sums over a number of ranks."""
        means, begin = {}, 0
        for name in names:
            shape = self._forms[name][0]
            means[name] = (vector[begin : begin + shape.numel()] / ranks).view(shape)
            begin += shape.numel()
        return means

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Copies of the buffers of this rank, of those with which the round has begun, and the names of those that are
        sent at once."""
        return {"values": copied(self.values()), "before": copied(self.before), "listed": [*self._listed]}

    def check(self, state: Any) -> None:
        """Raise a ValueError unless :meth:`load` may be given a state."""
        for key in ("values", "before"):
            found = state.get(key) if isinstance(state, dict) else None
            known = self._forms.keys() & found.keys() if isinstance(found, dict) else ()
            check_tensors(f"buffers {key}", found, self._like(known))
        if not isinstance(state.get("listed"), list) or not {*state["listed"]} <= self._forms.keys():
            raise ValueError("state: buffers listed must be a list of names of buffers of the model")

    def load(self, state: Any) -> None:
        """Continue from a state of :meth:`state_dict`."""
        values, before = self.values(), state["before"]
        for name, each in values.items():
            if name in state["values"]:
                each.copy_(state["values"][name])
        self.before = {name: before[name].to(each, copy=True) for name, each in values.items() if name in before}
        self._listed = [*state["listed"]]

    def read(self, state: Any) -> BufferArrival | None:
        """The buffers on their way of a state of :meth:`BufferArrival.state_dict`.

        Raises:
            ValueError: it is damaged, or of other buffers.
        """
        if state is None:
            return None
        keys = ("names", "sent", "vector", "ranks")
        names, sent, vector, ranks = map(state.get, keys) if isinstance(state, dict) else (None,) * 4
        if not isinstance(names, list) or not {*names} <= self._places.keys() or not isinstance(sent, dict):
            raise ValueError("state: arriving_buffers must be a dict with buffers of the model")
        numel = sum(self._forms[name][0].numel() for name in names) + 2 * len(self._places)
        if not isinstance(vector, torch.Tensor) or vector.shape != (numel,) or type(ranks) is not int:
            raise ValueError("state: arriving_buffers must have the sum of its buffers")
        check_tensors("sent", sent, self._like({*names} & sent.keys()))
        own = {name: each.clone() for name, each in sent.items()}
        return BufferArrival([*names], own, vector.to(self._device, self._dtype, copy=True), ranks)

    def _like(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Tensors without memory that have the shapes of some buffers."""
        return {name: torch.empty(self._forms[name][0], dtype=torch.float32, device="meta") for name in names}
