"""Muon for hidden matrices and AdamW for everything else, as one optimizer with one learning rate.

Jordan et al., https://kellerjordan.github.io/posts/muon; the scale of steps is that of Liu et al., arXiv:2502.16982, so
that both want the same learning rate. ``torch.optim.Muon`` takes matrices only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

WEIGHT_DECAY = 0.01


def hidden_matrices(network: nn.Module) -> list[nn.Parameter]:
    """The matrices of a network but those of embeddings and of its last linear layer."""
    last = [each for each in network.modules() if isinstance(each, nn.Linear)][-1:]
    ends = [each for each in network.modules() if isinstance(each, nn.Embedding)] + last
    excluded = {id(each.weight) for each in ends}
    return [each for each in network.parameters() if each.dim() == 2 and id(each) not in excluded]


class MuonAndAdamW(torch.optim.Optimizer):
    """Steps some matrices by Muon, and other parameters by AdamW.

    Args:
        parameters: all parameters.
        matrices: those that Muon steps.
        betas: the decays of AdamW's moments.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], matrices: Iterable[nn.Parameter], betas: tuple[float, float]
    ) -> None:
        hidden = {id(each): each for each in matrices}
        others = [each for each in parameters if id(each) not in hidden]
        self._parts: tuple[torch.optim.Optimizer, ...] = (
            torch.optim.Muon([*hidden.values()], weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, weight_decay=WEIGHT_DECAY, betas=betas),
        )
        groups = [group for part in self._parts for group in part.param_groups]
        groups[0]["decoupled_weight_decay"] = True
        super().__init__(groups, {})  # the same groups, so that a schedule sets the rates of the parts

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        for part in self._parts:
            part.step()
        return None
