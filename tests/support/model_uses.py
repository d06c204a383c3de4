"""Uses of a model between two steps of a training."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

Loss: TypeAlias = "Callable[[nn.Module], torch.Tensor]"
"""The loss of a module for some batch."""


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def assign_gradients(module: nn.Module, new: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    for parameter in module.parameters():
        if parameter.grad is not None:
            parameter.grad = new(parameter.grad)


def replace_memory_of_gradients(module: nn.Module, loss: Loss) -> None:
    for gradient in gradients(module):
        gradient.data = gradient.data.clone()


def replace_memory_of_parameters(module: nn.Module, loss: Loss) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()


def send_to_another_process(module: nn.Module, loss: Loss) -> None:
    if torch.get_default_device().type == "sim":
        return  # its memory belongs to one process
    for tensor in (*module.parameters(), *gradients(module)):
        ForkingPickler.dumps(tensor)  # as a queue of torch.multiprocessing does
    resource_sharer.stop()  # its thread, which gives the other process the memory


def free_gradients(module: nn.Module, loss: Loss) -> None:
    for gradient in gradients(module):
        if gradient.untyped_storage().resizable():
            gradient.untyped_storage().resize_(0)
    assign_gradients(module, lambda gradient: None)


def enlarge_gradients(module: nn.Module, loss: Loss) -> None:
    for gradient in gradients(module):
        if (storage := gradient.untyped_storage()).resizable():
            storage.resize_(storage.nbytes() + 4096)


def save_and_load(module: nn.Module, loss: Loss) -> None:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    module.load_state_dict(torch.load(file))


def save_whole(module: nn.Module, loss: Loss) -> None:
    torch.save(module, io.BytesIO())


def train_a_copy(module: nn.Module, loss: Loss) -> None:
    other = copy.deepcopy(module)
    loss(other).backward()


def train_what_was_pickled(module: nn.Module, loss: Loss) -> None:
    other = pickle.loads(pickle.dumps(module))
    loss(other).backward()


def average_weights(module: nn.Module, loss: Loss) -> None:
    averaged = AveragedModel(module)
    averaged.update_parameters(module)


def evaluate(module: nn.Module, loss: Loss) -> None:
    module.eval()
    with torch.inference_mode():
        loss(module)
    module.train()


def freeze_and_thaw(module: nn.Module, loss: Loss) -> None:
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    module.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)


def backward_by_hand(module: nn.Module, loss: Loss) -> None:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    torch.autograd.grad(loss(module), parameters, allow_unused=True)


USES: dict[str, Callable[[nn.Module, Loss], Any]] = {
    "nothing": lambda module, loss: None,
    "channels last": lambda module, loss: module.to(memory_format=torch.channels_last),
    "to another device and back": lambda module, loss: module._apply(torch.clone),
    "double and back": lambda module, loss: module.double().float(),
    "half and back": lambda module, loss: module.half().float(),
    "memory of gradients": replace_memory_of_gradients,
    "memory of parameters": replace_memory_of_parameters,
    "gradients copied": lambda module, loss: assign_gradients(module, torch.clone),
    "gradients dropped": lambda module, loss: assign_gradients(module, lambda gradient: None),
    "gradients scaled": lambda module, loss: assign_gradients(module, lambda gradient: gradient * 2),
    "gradients clipped": lambda module, loss: nn.utils.clip_grad_norm_(module.parameters(), 0.1),
    "gradients freed": free_gradients,
    "gradients enlarged": enlarge_gradients,
    "shared memory": lambda module, loss: module.share_memory(),
    "another process": send_to_another_process,
    "vector": lambda module, loss: vector_to_parameters(parameters_to_vector(module.parameters()), module.parameters()),
    "state": save_and_load,
    "saved whole": save_whole,
    "deep copy": train_a_copy,
    "copy": lambda module, loss: copy.copy(module),
    "pickle": train_what_was_pickled,
    "averaged weights": average_weights,
    "evaluation": evaluate,
    "frozen and thawed": freeze_and_thaw,
    "penalty": backward_by_hand,
    "looked at": lambda module, loss: (
        repr(module),
        list(module.named_modules()),
        [p.grad for p in module.parameters()],
    ),
    "garbage": lambda module, loss: gc.collect(),
}
BREAKS_DDP = {"double and back", "half and back", "channels last"}
"""Plain DDP averages wrongly after them, or raises."""
BREAKS_VIEWS = {*BREAKS_DDP, "to another device and back", "memory of gradients", "gradients freed"}
"""With ``gradient_as_bucket_view`` it does so after more of them."""
