"""Factors of the steps of an optimizer that normalises the gradients of a small batch.

Adam divides by the root of the second moment of a gradient. With one rank it has the noise of a part of the batch, so
its steps are shorter than those on the mean gradient of all ranks, and more so with more ranks. Muon makes steps of one
length, but those of the ranks have noise in different directions, so their mean is shorter. A factor for each tensor
makes up for it: ``sqrt(mean(norm(g_i)^2) / norm(mean(g_i))^2)``, for the gradients ``g_i`` of the ranks. It
changes in the course of a training, so it is measured in every round.

Ranks send a few sums in place of their gradients. Elements of a tensor, or of 16 pieces of it, get random signs and are
added up in 16 sums. The sum of the squares of these has the squared norm as its expectation (Alon, Matias, Szegedy, The
space complexity of approximating the frequency moments, 1999). Both norms are of such sums, so their errors have a part
in common, and without noise the factor is 1.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...communication.agreement import named
from .site_parameters import values_of

_SUMS, _SAMPLE, _MEMORY = 16, 2**14, 0.9
_MEASURING = "the mean of the sums for factors of steps"
_DECOUPLED = (torch.optim.Adafactor, torch.optim.Muon)
"""Optimizers whose weight decay is decoupled, although their parameter groups do not say so."""


class StepScales:
    """The factors of the tensors of a model, and the steps that are made longer by them.

    Args:
        optimizers: make the steps that get factors.
        group: the ranks that average updates.
        device: the device of the gradients.
    """

    def __init__(
        self, optimizers: Sequence[torch.optim.Optimizer], group: dist.ProcessGroup, device: torch.device
    ) -> None:
        self._optimizers, self._group, self._device = optimizers, group, device
        self._ranks = dist.get_world_size(group)
        self._signs: tuple[dict[str, int], torch.Tensor] | None = None  # by the tensors that have them
        self._measured: tuple[torch.Tensor, list[str], dist.Work] | None = None
        self._norms: dict[str, tuple[float, float]] = {}  # smoothed: of own gradients, and of their mean
        self._factors: dict[str, float] = {}
        self._begins: dict[str, torch.Tensor] = {}
        self._with_gradient = set[str]()  # when the step began

    def factor(self, name: str) -> float:
        """The factor of the steps of a parameter, from 1 to the root of the number of ranks."""
        own, mean = self._norms.get(name, (0.0, 0.0))
        return min(max(math.sqrt(own / mean), 1.0), math.sqrt(self._ranks)) if own > 0 < mean else 1.0

    def before_step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, torch.nn.Parameter],
        values: Mapping[str, torch.Tensor],
    ) -> None:
        """Note where a step begins.

        Args:
            optimizer: makes it.
            parameters: the parameters, by name.
            values: the values that this rank has of them.
        """
        self._begins = {}  # a step that has failed may have left some
        if not self._norms or all(each is not optimizer for each in self._optimizers):
            return
        decoupled = isinstance(optimizer, _DECOUPLED)
        kept = {id(each): _kept(group, decoupled) for group in optimizer.param_groups for each in group["params"]}
        # with a closure, backward is in the step
        stepped = {name: each for name, each in parameters.items() if id(each) in kept and each.requires_grad}
        self._with_gradient = {name for name, each in stepped.items() if each.grad is not None}
        factors = {name: self.factor(name) for name in stepped}
        self._factors = {name: factor for name, factor in factors.items() if factor > 1}
        if not self._factors:
            return
        begins = torch._foreach_mul(
            [values[name] for name in self._factors], [kept[id(parameters[name])] for name in self._factors]
        )
        self._begins = dict(zip(self._factors, begins, strict=True))

    def after_step(self, parameters: Mapping[str, torch.nn.Parameter], values: Mapping[str, torch.Tensor]) -> None:
        """Make the step longer that has just been made; nothing if it was skipped. Parameters without a gradient have
        made none.

        Args:
            parameters: the parameters, by name.
            values: the values that this rank has of them.
        """
        begun, self._begins = self._begins, {}
        has_gradient = {name for name in begun if name in self._with_gradient or parameters[name].grad is not None}
        begins = {name: each for name, each in begun.items() if name in has_gradient}
        if begins:
            stepped, before = [values[name] for name in begins], [*begins.values()]
            torch._foreach_sub_(stepped, before)
            torch._foreach_mul_(stepped, [self._factors[name] for name in begins])
            torch._foreach_add_(stepped, before)

    # ---------------------------------------------------------------- measuring

    def measure(self, gradients: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> None:
        """Begin to measure the factors on the gradients of all ranks. Collective.

        Args:
            gradients: the gradients of this rank, by name. A parameter without one counts as zeros.
            values: the parameters, whose names and shapes are the same on all ranks.
        """
        sums = self._sums(gradients, values).nan_to_num_(0.0, 0.0, 0.0)
        with named(self._group, _MEASURING):
            work = dist.all_reduce(sums, group=self._group, async_op=True)
        self._measured = sums, [*values], work

    def end_measuring(self) -> None:
        """Take the factors that were measured last, if there are any."""
        if self._measured is None:
            return
        (sums, names, work), self._measured = self._measured, None
        with named(self._group, _MEASURING):
            work.wait()
        sums /= self._ranks
        each = torch.stack((sums[:, _SUMS], sums[:, :_SUMS].square().sum(1)), 1).double().cpu().tolist()
        for name, (own, mean) in zip(names, each, strict=True):
            before = self._norms.get(name, (own, mean))
            self._norms[name] = (
                _MEMORY * before[0] + (1 - _MEMORY) * own,
                _MEMORY * before[1] + (1 - _MEMORY) * mean,
            )

    def _sums(self, gradients: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The sums of gradients with signs, and the sums of their squares, ``fp32 [tensors, 17]``."""
        counts = {name: min(each.numel(), _SAMPLE) // _SUMS for name, each in values.items()}
        found = {name: count for name, count in counts.items() if name in gradients and count}
        rows = dict.fromkeys(counts, torch.zeros(_SUMS, dtype=torch.float32, device=self._device))
        if found:
            samples = torch.cat([_pieces(values_of(gradients[name]), count) for name, count in found.items()], 1)
            signed = samples.float() * self._signs_of(found)
            rows |= {
                name: each.sum(1) for name, each in zip(found, torch.split(signed, [*found.values()], 1), strict=True)
            }
        sums = torch.stack([*rows.values()])
        return torch.cat((sums, sums.square().sum(1, keepdim=True)), 1)

    def _signs_of(self, counts: dict[str, int]) -> torch.Tensor:
        """The signs of some elements of tensors, ``fp32 [16, all of them]``, the same on all ranks.

        Args:
            counts: the number of columns of each tensor, by name.
        """
        if self._signs is None or self._signs[0] != counts:
            bits = []
            for name, count in counts.items():
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                bits.append(torch.randint(0, 2, (_SUMS, count), generator=generator, dtype=torch.int8, device="cpu"))
            self._signs = counts, (2.0 * torch.cat(bits, 1) - 1.0).to(self._device)
        return self._signs[1]

    # ---------------------------------------------------------------- checkpoints

    def state_dict(self) -> dict[str, tuple[float, float]]:
        """The smoothed squared norms, by name: of the gradients of ranks, and of their means."""
        return dict(self._norms)

    def load(self, state: Any) -> None:
        """Continue from what :meth:`state_dict` has returned; with anything else from the beginning."""
        self._norms = {name: (float(own), float(mean)) for name, (own, mean) in state.items()} if state else {}


def _kept(group: Mapping[str, Any], is_decoupled: bool) -> float:
    """The part of a parameter that a step's decoupled weight decay leaves. It is not made longer."""
    decays = group.get("decoupled_weight_decay", is_decoupled)
    return 1.0 - float(group["lr"]) * float(group.get("weight_decay", 0.0)) if decays else 1.0


def _pieces(gradient: torch.Tensor, count: int) -> torch.Tensor:
    """The first elements of 16 pieces of a gradient, ``[16, count]``."""
    rows = gradient.numel() // _SUMS
    return gradient.reshape(-1)[: _SUMS * rows].view(_SUMS, rows)[:, :count]
