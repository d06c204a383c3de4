"""Small models with difficult parameters, and their batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

SMALL_BUCKETS = 0.005  # MiB; gives the models below several buckets


class Mlp(nn.Module):
    """A network of three layers with odd dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(23, 67), nn.Tanh(), nn.Linear(67, 41), nn.Tanh(), nn.Linear(41, 7))

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return F.cross_entropy(self.layers(batch["x"]), batch["y"])

    @staticmethod
    def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        x = torch.randn(8, 23, generator=_generator(step, rank))
        return {"x": x.to(dtype), "y": x[:, :7].argmax(1)}


class Backwards(Mlp):
    """A network of layers without biases, registered last layer first: the order in which gradients become ready."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers
        self.third = nn.Linear(41, 7, bias=False)
        self.second = nn.Linear(67, 41, bias=False)
        self.first = nn.Linear(23, 67, bias=False)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(batch["x"]))))
        return F.cross_entropy(self.third(hidden), batch["y"])


class Zoo(nn.Module):
    """A network with many kinds of parameters.

    It has an embedding tied to the output, a channels-last convolution, a norm, biases, a scalar, a matrix of one
    element, a matrix without elements, and a frozen layer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 24)
        self.conv = nn.Conv2d(5, 12, 3).to(memory_format=torch.channels_last)
        self.squeeze = nn.Linear(12 * 4, 24)
        self.norm = nn.LayerNorm(24)
        self.wide = nn.Linear(24, 130)
        self.narrow = nn.Linear(130, 24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.single = nn.Parameter(torch.ones(1, 1))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.output = nn.Linear(24, 19)
        self.output.weight = self.embedding.weight

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        seen = self.squeeze(torch.tanh(self.conv(batch["images"])).flatten(1)) * self.gain
        read = self.embedding(batch["tokens"]).mean(1) * self.single
        hidden = self.norm(seen + self.frozen(read)) + self.empty.sum()
        hidden = hidden + self.narrow(torch.tanh(self.wide(hidden)))
        return F.cross_entropy(self.output(hidden), batch["target"])

    @staticmethod
    def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        generator = _generator(step, rank)
        images = torch.randn(6, 5, 4, 4, generator=generator).to(dtype=dtype, memory_format=torch.channels_last)
        tokens = torch.randint(0, 19, (6, 5), generator=generator)
        return {"images": images, "tokens": tokens, "target": tokens[:, 0]}


class Branches(nn.Module):
    """A network with an unused layer and two branches; the step and the rank decide which branches are used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(23, 40)
        self.left = nn.Linear(40, 30)
        self.right = nn.Linear(40, 30)
        self.never = nn.Linear(40, 30)
        self.output = nn.Linear(30, 7)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(batch["x"]))
        used = [branch(hidden) for name, branch in (("left", self.left), ("right", self.right)) if batch[name]]
        return F.cross_entropy(self.output(sum(used, torch.zeros(30))), batch["y"])

    @staticmethod
    def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        batch = Mlp.batch(step, rank, dtype)
        match step % 5:
            case 0:  # all ranks use both branches
                batch |= {"left": True, "right": True}
            case 1:  # the right branch is unused on rank 0
                batch |= {"left": True, "right": rank != 0}
            case 2:  # the right branch is unused on all ranks
                batch |= {"left": True, "right": False}
            case 3:  # each rank uses one branch
                batch |= {"left": rank % 2 == 0, "right": rank % 2 == 1}
            case 4:  # the left branch is unused on all ranks
                batch |= {"left": False, "right": True}
        return batch


class Partly(Branches):
    """The same network with the same unused parameters in every step, as DDP's static graph requires."""

    @staticmethod
    def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        return Mlp.batch(step, rank, dtype) | {"left": True, "right": False}


class Halves(nn.Module):
    """A network of two parts, with a loss for each."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(5, 3), nn.Linear(5, 4)])

    def forward(self, batch: torch.Tensor) -> dict[str, torch.Tensor]:
        return {str(index): part(batch).sum() for index, part in enumerate(self.parts)}


MODELS: dict[str, type[nn.Module]] = {model.__name__: model for model in (Mlp, Backwards, Zoo, Branches, Partly)}


def build(model: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A model by name; the same seed gives the same parameters in every process."""
    torch.manual_seed(seed)
    return MODELS[model]().to(dtype)


def _generator(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + rank)
