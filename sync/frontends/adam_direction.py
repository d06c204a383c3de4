"""Adam's directions in place of gradients, so that what is compressed and averaged is already a step."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.adam import adam
from torch.utils.hooks import RemovableHandle

from ..plans.arguments import differentiable
from ..plans.strides import in_reals
from .checks.models import refuse_sharded
from .checks.optimizer_checks import in_a_scaler, unwrapped

_CALLER = "AdamDirection"
_STATE = ("steps", "first_moments", "second_moments")
_SHRUNK = 0.02
"""The part of its usual length from which on a gradient has been made shorter behind the directions."""


class AdamDirection:
    """Replace each gradient of a model in backward by Adam's direction, before it is compressed and averaged.

    The direction is ``m / (sqrt(v) + eps)``, with the moments ``m`` and ``v`` of this rank's own gradients and their
    corrections at the start (Kingma and Ba, arXiv:1412.6980). ``torch.optim.SGD`` with AdamW's learning rate and
    weight decay makes the step of it. Error feedback then is behind Adam's division, as with
    :class:`~gckernels.sync.Updates` of one step, and communication overlaps with backward, as with gradients::

        model = DistributedDataParallel(network)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, weight_decay=0.01)  # AdamW's
        direction = sync.AdamDirection(network, optimizer, betas=(0.9, 0.95))
        attachment = sync.attach(model, plan)

    Every step takes one backward: gradients that accumulate are refused. Nothing may scale gradients between backward
    and the step. A direction has about one per element, so clipping to a norm of 1 would stop the training; a warning
    says so at the first step. A gradient scaler is refused. A scheduler must not cycle a momentum.

    Args:
        model: a module, bare or in DistributedDataParallel, whose parameters are this rank's own.
        optimizer: a ``torch.optim.SGD`` without a momentum. Each of its parameters that has a gradient must be one of
            the model from now.
        betas: the decays of the moments, from 0 to below 1.
        eps: what is added to the root, above 0.

    Raises:
        TypeError, ValueError: an argument is not valid.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"{_CALLER}: model must be a torch.nn.Module, got {type(model).__name__}")
        refuse_sharded(_CALLER, model)
        if isinstance(model, DistributedDataParallel):
            model = model.module  # names are those of the module, as elsewhere
        named = differentiable(model.named_parameters()).items()
        parameters = {name: each for name, each in named if each.requires_grad}
        for name, parameter in parameters.items():
            if hasattr(parameter, "to_local"):
                raise TypeError(f"{_CALLER}: model must not be sharded, and its parameter {name} is a DTensor")
        optimizer = unwrapped(optimizer)
        _check_optimizer(optimizer)
        if not (len(betas) == 2 and all(isinstance(beta, int | float) and 0 <= beta < 1 for beta in betas)):
            raise ValueError(f"{_CALLER}: betas must be two numbers from 0 to below 1, got {betas!r}")
        if not (isinstance(eps, int | float) and 0 < eps < math.inf):
            raise ValueError(f"{_CALLER}: eps must be a number above 0, got {eps!r}")
        self._betas, self._eps = betas, eps
        self._moments: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._places = {name: (tuple(in_reals(each).shape), each.device) for name, each in parameters.items()}
        self._ids = {id(each) for each in parameters.values()}  # no references, which would keep the model alive
        self._made = set[str]()  # since the last step
        self._squares: list[torch.Tensor] | None = []  # sums of those of the directions, until the first step
        self._handles: list[RemovableHandle] = [
            each.register_hook(functools.partial(self._directed, name))  # type: ignore[no-untyped-call]
            for name, each in parameters.items()
        ]
        self._handles.append(optimizer.register_step_pre_hook(self._before_step))

    def remove(self) -> None:
        """Leave gradients as they are from now on."""
        for handle in self._handles:
            handle.remove()

    @torch.no_grad()
    def _directed(self, name: str, grad: torch.Tensor) -> torch.Tensor:
        """The direction for a gradient."""
        if grad.is_sparse:
            raise RuntimeError(f"gckernels: {_CALLER} does not support sparse gradients; {name} has one")
        if name in self._made:
            raise RuntimeError(
                f"gckernels: {name} has a second gradient since the last step, and {_CALLER} is for one backward in "
                "each; sync.Updates takes gradients that accumulate"
            )
        self._made.add(name)
        reals = in_reals(grad)
        values = reals.to(torch.promote_types(reals.dtype, torch.float32)).contiguous()
        if name not in self._moments:
            steps = torch.zeros((), dtype=torch.float32, device=values.device)
            self._moments[name] = steps, torch.zeros_like(values), torch.zeros_like(values)
        steps, first, second = self._moments[name]
        direction = torch.zeros_like(values)
        adam(  # a step of length -1 from zero
            [direction],
            [values],
            [first],
            [second],
            [],
            [steps],
            fused=True,
            amsgrad=False,
            maximize=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=-1.0,
            weight_decay=0.0,
            eps=self._eps,
        )
        if self._squares is not None:
            self._squares.append(direction.square().sum())
        direction = direction.to(reals.dtype)
        return torch.view_as_complex(direction) if grad.is_complex() else direction

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Check what the optimizer is given."""
        if in_a_scaler():
            raise RuntimeError(
                f"gckernels: a GradScaler would divide Adam's directions by its scale; {_CALLER} is for trainings "
                "without one, with sync.Updates a grad_scaler can be given"
            )
        _check_optimizer(optimizer)
        grads = {id(each): each.grad for group in optimizer.param_groups for each in group["params"]}
        others = [each.shape for key, each in grads.items() if each is not None and key not in self._ids]
        if others:
            raise RuntimeError(
                f"gckernels: a parameter of shape {tuple(others[0])} has a plain gradient, because it was frozen or "
                f"not in the model when {_CALLER} was made; make another one for the model as it is"
            )
        squares, self._squares = self._squares, None
        if squares:
            made = math.sqrt(sum(map(float, squares)))
            found = math.sqrt(sum(float(each.norm()) ** 2 for each in grads.values() if each is not None))
            if 0 < found < _SHRUNK * made:
                warnings.warn(
                    f"gckernels: the norm of all gradients is {found:.3g}, that of Adam's directions was {made:.3g}. "
                    "If gradients are clipped or scaled behind backward, the steps are too short: a direction has "
                    "about one per element, and needs no clipping",
                    stacklevel=2,
                )
        self._made.clear()

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, dict[str, torch.Tensor]]:
        """The moments of this rank and their numbers of steps, by the names of parameters."""
        return {
            name: {kind: each.detach().clone() for kind, each in zip(_STATE, moments, strict=True)}
            for name, moments in self._moments.items()
        }

    def load_state_dict(self, state: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Go on with the moments of :meth:`state_dict`.

        Raises:
            ValueError: the state is not one of this model.
        """
        for name, moments in state.items():
            shapes = [tuple(moments[kind].shape) for kind in _STATE if kind in moments]
            expected = self._places[name][0] if name in self._places else None
            if shapes != [(), expected, expected]:
                raise ValueError(
                    f"{_CALLER}: state must have moments of the model's parameters, got {name!r}: {shapes}"
                )
        self._moments = {}
        for name, moments in state.items():
            device = self._places[name][1]
            steps, first, second = (moments[kind].to(device, copy=True) for kind in _STATE)
            self._moments[name] = steps, first, second


def _check_optimizer(optimizer: object) -> None:
    """Raise unless an optimizer adds multiples of gradients to parameters, and nothing else but weight decay."""
    if not isinstance(optimizer, torch.optim.SGD):
        raise TypeError(f"{_CALLER}: optimizer must be a torch.optim.SGD, got {type(optimizer).__name__}")
    for group in optimizer.param_groups:
        if group["momentum"] or group["maximize"]:
            raise ValueError(
                f"{_CALLER}: optimizer must have no momentum and not maximize, because directions have Adam's; got "
                f"momentum {group['momentum']}, maximize {group['maximize']} (a scheduler may cycle the momentum: "
                "cycle_momentum=False)"
            )
