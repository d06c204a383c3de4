"""Where a synchronizer keeps gradients: vectors in which units lie one after the other.

The gradients of the parameters are views of these vectors, so that backward accumulates into them and the optimizer
reads what was synchronised there. Units come in the order in which they are launched, from the plan's last to its
first; all units that share a parameter are in the same vector.
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
    """Where the gradient of one parameter lies.

    Attributes:
        name: of the parameter.
        parameter: a weak reference to it; no model must live on because of its synchronizer.
        view: its gradient, of its shape and dtype, in the bucket's vector.
        reduced: its units that are reduced as they are.
        is_reduced: all of them are.
    """

    name: str
    parameter: weakref.ref[torch.nn.Parameter]
    view: torch.Tensor
    reduced: list[torch.Tensor]
    is_reduced: bool

    @property
    def is_expected(self) -> bool:
        """Whether a step gives the parameter a gradient: it is not frozen. A parameter that is gone counts, because
        ranks free it at different times and must expect the same."""
        parameter = self.parameter()
        return parameter is None or parameter.requires_grad

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient that the parameter has; ``None`` if it has none, or is gone."""
        parameter = self.parameter()
        return None if parameter is None else parameter.grad

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        parameter = self.parameter()
        if parameter is not None:
            parameter.grad = grad

    def take_out(self) -> torch.Tensor | None:
        """Part the parameter from its gradient and return that; what is written here does not change it any more."""
        grad, self.grad = self.grad, None
        return grad.clone() if grad is not None and grad.data_ptr() == self.view.data_ptr() else grad

    def collect(self, share: float, all_reduced: bool) -> None:
        """Bring the parameter's gradient here, where it is not yet; zeros where it has none. Multiply by ``share`` what
        is reduced as it is, or everything if ``all_reduced``: in the pass that copies, where there is one."""
        grad, at_once = self.grad, all_reduced or self.is_reduced
        if grad is None:
            self.view.zero_()
            return
        if grad.data_ptr() == self.view.data_ptr() and grad.stride() == self.view.stride():
            if at_once:
                self.view.mul_(share)
        elif at_once:
            torch.mul(grad, share, out=self.view)
        else:
            self.view.copy_(grad)
        if not at_once:
            for unit in self.reduced:
                unit.mul_(share)


@dataclass
class Bucket:
    """A vector of gradients.

    Attributes:
        vector: all of it, in real numbers.
        units: in it.
        slots: of the parameters in it, in order.
        waiting: the slots whose gradients have not come in this step.
    """

    vector: torch.Tensor
    units: list[Unit]
    slots: list[Slot]
    waiting: set[str] = field(default_factory=set)


def make_buckets(plan: Plan, parameters: Mapping[str, torch.nn.Parameter], most_nbytes: float) -> list[Bucket]:
    """The buckets of a plan, in the order in which they are launched.

    Args:
        plan: checked against the parameters.
        parameters: by name.
        most_nbytes: size that a bucket does not exceed, but for one of a single group of units that do not part.
    """
    buckets: list[Bucket] = []
    gathered: list[list[UnitPlan]] = []
    nbytes, kind = 0, None
    for group in _groups(plan):
        first = parameters[group[0].parameter]
        size = sum(unit.numel for unit in group) * in_reals(first).element_size()
        if gathered and (nbytes + size > most_nbytes or kind != (first.dtype, first.device)):
            buckets.append(_bucket(gathered, parameters))
            gathered, nbytes = [], 0
        gathered.append(group)
        nbytes, kind = nbytes + size, (first.dtype, first.device)
    if gathered:
        buckets.append(_bucket(gathered, parameters))
    return buckets


def _groups(plan: Plan) -> list[list[UnitPlan]]:
    """The units of the plan from the last to the first; the parts of a parameter together, in order."""
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
