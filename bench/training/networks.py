"""Networks that are trained by any optimizer, and judged by their loss on a test set in bits."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy

from bench.lib.rounds import CPU
from bench.training import fashion_mnist
from examples import bytes_lm, common, digits

MakeOptimizer = Callable[..., torch.optim.Optimizer]

_text = functools.cache(bytes_lm.load_text)
_images = functools.cache(functools.partial(fashion_mnist.load_data, CPU))


@dataclass(frozen=True)
class Network:
    """A network and its training.

    Attributes:
        build: returns a new network, initialised from torch's global random state.
        train: trains a model on this rank's part of every batch, with a number of steps, the highest learning rate, a
            function that makes an optimizer of the parameters, and a timer that is entered for each step.
        evaluate: returns the share of correct predictions on the test set, and the cross-entropy in bits; collective.
        steps: the usual number of steps.
        rising: the share of the steps in which the learning rate rises.
    """

    build: Callable[[], nn.Module]
    train: Callable[[nn.Module, int, float, MakeOptimizer, common.StepTimer], None]
    evaluate: Callable[[nn.Module], tuple[float, float]]
    steps: int
    rising: float

    def rates(self, steps: int) -> list[float]:
        """The learning rate of each step of a training, in parts of the highest one."""
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=1.0, total_steps=steps, pct_start=self.rising, cycle_momentum=False
        )
        found = []
        for _ in range(steps):
            found.append(float(optimizer.param_groups[0]["lr"]))
            optimizer.step()
            schedule.step()
        return found


class ByteGRU(nn.Module):
    """A recurrent network of bytes: two layers of gated recurrent units between an embedding and a linear layer."""

    def __init__(self, width: int = 160) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.layers = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.bytes(x))[0])
        return logits


def _train_text(
    model: nn.Module, steps: int, peak_lr: float, make_optimizer: MakeOptimizer, timer: common.StepTimer
) -> None:
    bytes_lm.train(model, _text()[0], timer, steps=steps, peak_lr=peak_lr, make_optimizer=make_optimizer)


def _evaluate_text(network: nn.Module) -> tuple[float, float]:
    return bytes_lm.evaluate(network, _text()[1], CPU)


def _train_images(
    model: nn.Module, steps: int, peak_lr: float, make_optimizer: MakeOptimizer, timer: common.StepTimer
) -> None:
    images, classes = _images()[:2]
    numel = min(len(images), steps * fashion_mnist.BATCH)  # one epoch, or less
    epochs = round(steps * fashion_mnist.BATCH / numel)
    digits.train(
        model,
        images[:numel],
        classes[:numel],
        timer,
        epochs=epochs,
        peak_lr=peak_lr,
        batch_size=fashion_mnist.BATCH,
        make_optimizer=make_optimizer,
    )


@torch.no_grad()
def _evaluate_images(network: nn.Module) -> tuple[float, float]:
    images, classes = _images()[2:]
    logits = torch.cat([network(part) for part in images.split(1000)])
    bits = float(cross_entropy(logits, classes)) / math.log(2)
    return float((logits.argmax(dim=1) == classes).double().mean()), bits


EPOCH_STEPS = fashion_mnist.TRAIN_IMAGES // fashion_mnist.BATCH
NETWORKS = {
    "bytes_lm": Network(bytes_lm.ByteTransformer, _train_text, _evaluate_text, 400, 0.1),
    "bytes_gru": Network(ByteGRU, _train_text, _evaluate_text, 400, 0.1),
    "fashion_mnist": Network(fashion_mnist.build_model, _train_images, _evaluate_images, 3 * EPOCH_STEPS, 0.3),
}


class Curve(common.StepTimer):
    """A timer of steps that evaluates the network between some of them.

    Args:
        network: evaluates it.
        module: the network, whose parameters may differ between ranks. Their mean is evaluated.
        every: the number of steps between two evaluations; 0 for none.

    Attributes:
        losses: the cross-entropy in bits, by the number of steps before.
    """

    def __init__(self, network: Network, module: nn.Module, every: int) -> None:
        super().__init__(CPU)
        self.losses: dict[int, float] = {}
        self._network, self._module, self._every, self._steps = network, module, every, 0

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self._steps += 1
        if self._every and self._steps % self._every == 0:
            mean = copy.deepcopy(self._module)
            average_parameters(mean)
            _, self.losses[self._steps] = self._network.evaluate(mean)

    def __str__(self) -> str:
        return " ".join(f"{steps}:{loss:.3f}" for steps, loss in self.losses.items())


def average_parameters(network: nn.Module) -> None:
    """Replace the parameters by their means over the ranks, with which a training ends inside a round. Collective."""
    with torch.no_grad():
        for parameter in network.parameters():
            dist.all_reduce(parameter)
            parameter.div_(dist.get_world_size())
