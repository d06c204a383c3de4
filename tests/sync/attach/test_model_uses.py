"""Whatever a training does with its model between two steps, gradients are those of a run with plain averages."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, parametrizations, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

from gckernels import Identity, sync
from gckernels.sync import ALLGATHER
from ranks import run_ranks, values_of
from workloads import digest_of


class Net(nn.Module):
    """A network with a convolution, whose weights can lie in memory in two orders, and with buffers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * 16, 9)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.norm(self.conv(batch)))
        return self.head(hidden.flatten(1)).square().mean()

    @staticmethod
    def batch(step: int, rank: int) -> torch.Tensor:
        return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(2 * step + rank))


# -------------------------------------------------------------------- what a training does


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def assign_gradients(module: nn.Module, new: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = new(parameter.grad)


def replace_memory_of_gradients(module: nn.Module) -> None:
    for gradient in gradients(module):
        gradient.data = gradient.data.clone()


def replace_memory_of_parameters(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def send_to_another_process(module: nn.Module) -> None:
    for tensor in (*module.parameters(), *gradients(module)):
        ForkingPickler.dumps(tensor)  # as a queue of torch.multiprocessing does
    resource_sharer.stop()  # its thread, which gives the other process the memory


def free_gradients(module: nn.Module) -> None:
    for gradient in gradients(module):
        if gradient.untyped_storage().resizable():
            gradient.untyped_storage().resize_(0)
    assign_gradients(module, lambda gradient: None)


def enlarge_gradients(module: nn.Module) -> None:
    for gradient in gradients(module):
        if (storage := gradient.untyped_storage()).resizable():
            storage.resize_(storage.nbytes() + 4096)


def save_and_load(module: nn.Module) -> None:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    module.load_state_dict(torch.load(file))


def save_whole(module: nn.Module) -> None:
    torch.save(module, io.BytesIO())


def train_a_copy(module: nn.Module) -> None:
    other = copy.deepcopy(module)
    other(Net.batch(100, dist.get_rank())).backward()


def train_what_was_pickled(module: nn.Module) -> None:
    other = pickle.loads(pickle.dumps(module))
    other(Net.batch(100, dist.get_rank())).backward()


def average_weights(module: nn.Module) -> None:
    averaged = AveragedModel(module)
    averaged.update_parameters(module)


def evaluate(module: nn.Module) -> None:
    module.eval()
    with torch.inference_mode():
        module(Net.batch(100, dist.get_rank()))
    module.train()


def freeze_and_thaw(module: nn.Module) -> None:
    module.requires_grad_(False)
    module.requires_grad_(True)


def backward_by_hand(module: nn.Module) -> None:
    torch.autograd.grad(module(Net.batch(100, dist.get_rank())), list(module.parameters()))


USES: dict[str, Callable[[nn.Module], Any]] = {
    "nothing": lambda module: None,
    "channels last": lambda module: module.to(memory_format=torch.channels_last),
    "to another device and back": lambda module: module._apply(torch.clone),
    "double and back": lambda module: module.double().float(),
    "half and back": lambda module: module.half().float(),
    "memory of gradients": replace_memory_of_gradients,
    "memory of parameters": replace_memory_of_parameters,
    "gradients copied": lambda module: assign_gradients(module, torch.clone),
    "gradients dropped": lambda module: assign_gradients(module, lambda gradient: None),
    "gradients scaled": lambda module: assign_gradients(module, lambda gradient: gradient * 2),
    "gradients clipped": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 0.1),
    "gradients freed": free_gradients,
    "gradients enlarged": enlarge_gradients,
    "shared memory": lambda module: module.share_memory(),
    "another process": send_to_another_process,
    "vector": lambda module: vector_to_parameters(parameters_to_vector(module.parameters()), module.parameters()),
    "state": save_and_load,
    "saved whole": save_whole,
    "deep copy": train_a_copy,
    "copy": copy.copy,
    "pickle": train_what_was_pickled,
    "averaged weights": average_weights,
    "evaluation": evaluate,
    "frozen and thawed": freeze_and_thaw,
    "penalty": backward_by_hand,
    "pruned": lambda module: prune.identity(module.head, "weight"),
    "normed": lambda module: parametrizations.spectral_norm(module.head),
    "looked at": lambda module: (repr(module), list(module.named_modules()), [p.grad for p in module.parameters()]),
    "garbage": lambda module: gc.collect(),
}


# -------------------------------------------------------------------- comparison with plain averages

FRONTS = ("Synchronizer", "attach", "attach to views")
BREAKS_DDP = {"double and back", "half and back", "channels last", "normed"}  # plain DDP averages wrongly, or raises
BREAKS_VIEWS = {*BREAKS_DDP, "to another device and back", "memory of gradients", "gradients freed"}
NOT_UNDER = {"Synchronizer": set[str](), "attach": BREAKS_DDP, "attach to views": BREAKS_VIEWS}


def average_plainly(module: nn.Module) -> None:
    for gradient in gradients(module):
        dist.all_reduce(gradient.mul_(1 / dist.get_world_size()))


def trained(use: str, front: str | None) -> list[str]:
    """Train around a use of the model with a plan that encodes without error, and return the digests of each step's
    gradients.

    Args:
        use: a key of :data:`USES`.
        front: the way in which gradients are averaged; ``None`` for plain averages.
    """
    module, handle = Net(), None
    model: nn.Module = module
    if front is not None and front != "Synchronizer":
        model = DistributedDataParallel(module, gradient_as_bucket_view=front == "attach to views")
    if front is not None:
        start = sync.Synchronizer if model is module else sync.attach
        handle = start(model, sync.plan(model, Identity(), program=ALLGATHER))
    digests = []
    for step in range(6):
        if step in (2, 4):
            USES[use](module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        optimizer.zero_grad(set_to_none=step > 2)
        model(Net.batch(step, dist.get_rank())).backward()
        if front is None:
            average_plainly(module)
        digests.append(digest_of(gradients(module)))
        optimizer.step()
    if handle is not None:
        handle.close()
    return digests


def wrong() -> list[tuple[str, str, list[bool]]]:
    """Uses after which gradients are not the plain averages, with the steps in which they are."""
    found = []
    for use in USES:
        expected = trained(use, None)
        for front in FRONTS:
            if use not in NOT_UNDER[front] and (digests := trained(use, front)) != expected:
                found.append((use, front, list(map(str.__eq__, digests, expected))))
    return found


def test_gradients_after_any_use_of_the_model():
    assert values_of(run_ranks(2, wrong)) == [[], []]
