"""The gradient buckets of a synchronizer: vectors in which units lie one after the other.

The gradients of the parameters are views of these vectors, so backward accumulates into the buckets and the optimizer
reads the synchronised values there. Units lie in the order in which they are launched, from the last of the plan to the
first. All units that share a parameter are in one bucket.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ..messages.message import Unit
from ..plans.plan import Plan, UnitPlan
from ..plans.strides import grad_strides, in_reals
from ..programs.named import ALLREDUCE


@dataclass
class Slot:
    """The gradient of one parameter in a bucket.

    Attributes:
        name: name of the parameter.
        parameter: a weak reference to it, so that a synchronizer does not keep the model alive.
        view: its gradient, with its shape and dtype, in the bucket's vector.
        reduced: the gradients of those units that are averaged without compression.
        is_reduced: whether these are all units of the parameter.
    """

    name: str
    parameter: weakref.ref[torch.nn.Parameter]
    view: torch.Tensor
    reduced: list[torch.Tensor]
    is_reduced: bool

    @property
    def is_expected(self) -> bool:
        """Whether a training step gives the parameter a gradient, because it is not frozen.

        A parameter that no longer exists is expected, because ranks free it at different times and must agree.
        """
        parameter = self.parameter()
        return parameter is None or parameter.requires_grad

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the parameter; ``None`` if it has none, or no longer exists."""
        parameter = self.parameter()
        return None if parameter is None else parameter.grad

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        parameter = self.parameter()
        if parameter is not None:
            parameter.grad = grad

    def take_out(self) -> torch.Tensor | None:
        """Take the gradient away from the parameter and return it; a copy if it lies in the bucket."""
        grad, self.grad = self.grad, None
        return grad.clone() if grad is not None and grad.data_ptr() == self.view.data_ptr() else grad

    def collect(self, share: float, all_reduced: bool) -> None:
        """Copy the parameter's gradient into the bucket, unless it lies there; without a gradient, write zeros.

        Args:
            share: factor for the units that are averaged without compression, applied while copying where possible.
            all_reduced: whether the factor is for all units, because nothing is compressed in this step.
        """
        grad, scale_all = self.grad, all_reduced or self.is_reduced
        if grad is None:
            self.view.zero_()
            return
        if grad.data_ptr() == self.view.data_ptr() and grad.stride() == self.view.stride():
            if scale_all:
                self.view.mul_(share)
        elif scale_all:
            torch.mul(grad, share, out=self.view)
        else:
            self.view.copy_(grad)
        if not scale_all:
            for unit in self.reduced:
                unit.mul_(share)


@dataclass
class Bucket:
    """A vector of gradients.

    Attributes:
        vector: ``[numel]``, real numbers.
        units: the units in it, in order.
        slots: the slots of its parameters, in order.
        waiting: names of the parameters whose gradients are still missing in this step.
    """

    vector: torch.Tensor
    units: list[Unit]
    slots: list[Slot]
    waiting: set[str] = field(default_factory=set)


def make_buckets(plan: Plan, parameters: Mapping[str, torch.nn.Parameter], max_nbytes: float) -> list[Bucket]:
    """The buckets of a plan, in the order in which they are launched.

    Args:
        plan: a plan that fits the parameters.
        parameters: the parameters of the plan, by name.
        max_nbytes: maximum size of a bucket. Only a bucket whose units share a parameter may be larger.
    """
    buckets: list[Bucket] = []
    gathered: list[list[UnitPlan]] = []
    nbytes, kind = 0, None
    for group in _groups(plan):
        first = parameters[group[0].parameter]
        size = sum(unit.numel for unit in group) * in_reals(first).element_size()
        if gathered and (nbytes + size > max_nbytes or kind != (first.dtype, first.device)):
            buckets.append(_bucket(gathered, parameters))
            gathered, nbytes = [], 0
        gathered.append(group)
        nbytes, kind = nbytes + size, (first.dtype, first.device)
    if gathered:
        buckets.append(_bucket(gathered, parameters))
    return buckets


def _groups(plan: Plan) -> list[list[UnitPlan]]:
    """The units of the plan from the last to the first; the parts of one parameter are a group, in order."""
    groups: dict[str, list[UnitPlan]] = {}
    for unit in reversed(plan.units):
        groups.setdefault(unit.parameter, []).append(unit)
    return [sorted(group, key=lambda unit: unit.start or 0) for group in groups.values()]


def _bucket(groups: list[list[UnitPlan]], parameters: Mapping[str, torch.nn.Parameter]) -> Bucket:
    numel = sum(unit.numel for group in groups for unit in group)
    some = in_reals(parameters[groups[0][0].parameter])
    bucket = Bucket(torch.zeros(numel, dtype=some.dtype, device=some.device), [], [])
    first = 0
    for group in groups:
        start = first
        units = []
        for unit in group:
            units.append(Unit(unit, bucket.vector[first : first + unit.numel]))
            first += unit.numel
        reduced = [unit.grad for unit in units if unit.plan.program == ALLREDUCE]
        for name in group[0].parameters:
            parameter, reals = parameters[name], in_reals(parameters[name])
            piece = bucket.vector[start : start + reals.numel()]
            view = piece.as_strided(reals.shape, grad_strides(reals))
            view = torch.view_as_complex(view) if parameter.is_complex() else view
            bucket.slots.append(Slot(name, weakref.ref(parameter), view, reduced, len(reduced) == len(units)))
            start += reals.numel()
        bucket.units += units
    return bucket
