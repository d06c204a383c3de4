"""The parameters of a model: what they are called, which of them can have a gradient, which models have others."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""The names under which torch.compile and activation checkpointing keep a module in another one around it."""


def plain_name(name: str) -> str:
    """The name of a parameter in the model as it was written: without the modules that torch.compile and activation
    checkpointing put around others. ``"0._orig_mod.weight"`` is ``"0.weight"``."""
    if not any(wrapper in name for wrapper in _WRAPPERS):
        return name
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def differentiable(parameters: Iterable[tuple[str, torch.nn.Parameter]]) -> dict[str, torch.nn.Parameter]:
    """The parameters that can have a gradient, frozen or not, by their plain names; integers cannot.

    Raises:
        ValueError: two of them have the same plain name.
    """
    found: dict[str, torch.nn.Parameter] = {}
    for given, parameter in parameters:
        name = plain_name(given)
        if name in found:
            raise ValueError(f"two parameters are called {name} where torch.compile is not counted: rename one of them")
        if parameter.is_floating_point() or parameter.is_complex():
            found[name] = parameter
    return found


def of_ddp(ddp_model: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """The parameters that a DDP model averages, by their plain names in the wrapped module."""
    ignored, named = ddp_model.parameters_to_ignore, ddp_model.module.named_parameters()
    return differentiable((name, each) for name, each in named if each.requires_grad and name not in ignored)


# -------------------------------------------------------------------- what is refused


def refuse_sharded(what: str, model: torch.nn.Module) -> None:
    """Raise a TypeError if the model, or a part of it, is one of FSDP's."""
    kinds = _known("torch.distributed.fsdp", "FSDPModule", "FullyShardedDataParallel")
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            where = f"its module {name} is" if name else "it is"
            raise TypeError(
                f"{what}: the model is not supported, {where} sharded by FSDP, which averages gradients itself; use "
                "DistributedDataParallel and attach(), or Synchronizer, with a model that is not sharded"
            )


def refuse_without_dense_gradients(
    what: str, model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]
) -> None:
    """Raise unless every parameter has memory of its own on this rank, and a gradient as large, as far as can be known
    before there is one.

    Args:
        what: the caller, for errors.
        model: it, with its modules.
        parameters: of the model, those that are to be synchronised, by name.

    Raises:
        TypeError: a parameter is a DTensor.
        ValueError: a parameter has no memory yet, or a module of the model gives it a sparse gradient.
    """
    dtensor = _known("torch.distributed.tensor", "DTensor")
    for name, parameter in parameters.items():
        if isinstance(parameter, dtensor):
            raise TypeError(
                f"{what}: parameter {name} is a DTensor, which is not supported; gradients of tensors of one rank are"
            )
        if is_lazy(parameter):
            raise ValueError(f"{what}: parameter {name} has no shape yet; run the model once before")
        if parameter.is_meta:
            raise ValueError(
                f"{what}: parameter {name} is on the device meta and has no values; give it some before, for example "
                "with model.to_empty(device=...) and load_state_dict"
            )
    embeddings = (each for each in model.modules() if isinstance(each, torch.nn.Embedding | torch.nn.EmbeddingBag))
    sparse = {id(each.weight) for each in embeddings if each.sparse}
    for name, parameter in parameters.items():
        if id(parameter) in sparse and parameter.requires_grad:
            raise ValueError(f"{what}: {_sparse(name)}")


def refuse_sparse_gradient(name: str, gradient: torch.Tensor | None) -> None:
    """Raise a RuntimeError if the gradient of the parameter of that name is sparse."""
    if gradient is not None and gradient.layout != torch.strided:
        raise RuntimeError(f"gckernels: {_sparse(name)}")


def watch_for_sparse_gradients(parameters: Mapping[str, torch.nn.Parameter]) -> list[RemovableHandle]:
    """Let backward raise a RuntimeError if the first gradient of a parameter is sparse, as that of
    ``torch.nn.functional.embedding`` can be without a module that says so. DDP, which comes later, would raise an error
    about memory.

    Returns:
        Handles that remove the hooks of parameters that have had no gradient; others remove theirs.
    """
    return [_watch(name, parameter) for name, parameter in parameters.items()]


def _watch(name: str, parameter: torch.nn.Parameter) -> RemovableHandle:
    def hook(parameter: torch.Tensor) -> None:
        handle.remove()
        refuse_sparse_gradient(name, parameter.grad)

    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return handle


def _sparse(name: str) -> str:
    return f"parameter {name} has a sparse gradient, which cannot be synchronised; let its embedding have sparse=False"


def _known(module: str, *names: str) -> tuple[type, ...]:
    """Classes of a module, by name; none while the module is not imported, for then nothing is of these classes."""
    imported = sys.modules.get(module)
    return tuple(getattr(imported, name) for name in names if hasattr(imported, name))
