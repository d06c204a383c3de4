"""Muon for hidden matrices and AdamW for everything else, as one optimizer with one learning rate.

Jordan et al., https://kellerjordan.github.io/posts/muon, with the scale of steps of Liu et al., arXiv:2502.16982, so
that both want the same learning rate. It is ``torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`` with products in fp32:
in bf16 a CPU takes forty times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

WEIGHT_DECAY, MOMENTUM, ITERATIONS = 0.01, 0.95, 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def hidden_matrices(network: nn.Module) -> list[nn.Parameter]:
    """The matrices of a network but those of embeddings and of its last linear layer."""
    last = [each for each in network.modules() if isinstance(each, nn.Linear)][-1:]
    ends = [each for each in network.modules() if isinstance(each, nn.Embedding)] + last
    excluded = {id(each.weight) for each in ends}
    return [each for each in network.parameters() if each.dim() == 2 and id(each) not in excluded]


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with singular values of about 1, by a Newton-Schulz iteration of degree five."""
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class MuonAndAdamW(torch.optim.Optimizer):
    """Steps some matrices by Muon, and other parameters by AdamW.

    Args:
        parameters: all parameters.
        matrices: the parameters that Muon steps.
        betas: the decays of AdamW's moments.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], matrices: Iterable[nn.Parameter], betas: tuple[float, float]
    ) -> None:
        hidden = {id(each): each for each in matrices}
        self._adamw = torch.optim.AdamW(
            [each for each in parameters if id(each) not in hidden], betas=betas, weight_decay=WEIGHT_DECAY
        )
        settings = {"lr": 1e-3, "weight_decay": WEIGHT_DECAY, "decoupled_weight_decay": True}
        muon = {"params": [*hidden.values()], **settings}
        super().__init__([muon, *self._adamw.param_groups], {})  # the same group, so that a schedule sets its rate

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self._adamw.step()
        group = self.param_groups[0]
        for matrix in group["params"]:
            if matrix.grad is None:
                continue
            state = self.state[matrix]
            if not state:
                state["momentum"] = torch.zeros_like(matrix)
            momentum = state["momentum"].lerp_(matrix.grad, 1 - MOMENTUM)
            step = orthogonalised(matrix.grad.lerp(momentum, MOMENTUM))
            matrix.mul_(1 - group["lr"] * group["weight_decay"])
            matrix.sub_(step, alpha=0.2 * math.sqrt(max(matrix.shape)) * group["lr"])
        return None
