"""Models whose gradients can be synchronised: the parameters that DDP averages, and refusals of all other models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from gckernels.codec import GRAD_DTYPES

from ...plans.arguments import differentiable
from ...plans.strides import in_reals

FABRIC = ("lightning", "lightning_fabric")
"""The packages that have Lightning Fabric."""


def inside_fabric(model: Any) -> Any:
    """The model inside one that Lightning Fabric has set up, in DDP or by FSDP2, without the wrapper of a compiler;
    anything else as it is."""
    if type(model).__module__.split(".")[0] not in FABRIC or not hasattr(model, "_forward_module"):
        return model
    inner = model._forward_module
    return getattr(inner, "_orig_mod", inner)


def ddp_parameters(ddp_model: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """The parameters that a DDP model averages, by their plain names in the wrapped module."""
    ignored, named = ddp_model.parameters_to_ignore, ddp_model.module.named_parameters()
    return differentiable((name, each) for name, each in named if each.requires_grad and name not in ignored)


def is_sharded(model: object) -> bool:
    """Whether FSDP2 shards or replicates a model, or a part of it."""
    kinds = _known("torch.distributed.fsdp", "FSDPModule")
    return isinstance(model, torch.nn.Module) and any(isinstance(module, kinds) for module in model.modules())


def refuse_sharded(caller: str, model: torch.nn.Module) -> None:
    """Raise a TypeError if FSDP1 shards the model or a part of it."""
    kinds = _known("torch.distributed.fsdp", "FullyShardedDataParallel")
    for name, module in model.named_modules():
        if isinstance(module, kinds):
            where = f"its module {name} is" if name else "it is"
            raise TypeError(
                f"{caller}: the model is not supported, {where} in FullyShardedDataParallel; use fully_shard, or a "
                "model that is not sharded, bare or in DistributedDataParallel"
            )


def refuse_without_shape(caller: str, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise a ValueError that names a parameter if a lazy module has not given it a shape yet."""
    for name, parameter in parameters.items():
        if is_lazy(parameter):
            raise ValueError(f"{caller}: parameter {name} has no shape yet; run the model once before")


def refuse_without_memory(caller: str, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise unless every parameter is a tensor of this rank alone, with memory.

    Args:
        caller: the function that was called, for errors.
        parameters: the parameters that are to be synchronised, by name.

    Raises:
        TypeError: a parameter is a DTensor.
        ValueError: a parameter has no memory yet.
    """
    refuse_without_shape(caller, parameters)
    dtensor = _known("torch.distributed.tensor", "DTensor")
    for name, parameter in parameters.items():
        if isinstance(parameter, dtensor):
            raise TypeError(
                f"{caller}: parameter {name} is a DTensor, which is not supported; use tensors that each rank has alone"
            )
    refuse_without_values(caller, parameters)


def refuse_without_values(caller: str, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise a ValueError that names a parameter if a parameter has no values yet, because it is on the device meta."""
    for name, parameter in parameters.items():
        if parameter.is_meta:
            raise ValueError(
                f"{caller}: parameter {name} is on the device meta and has no values; give it some before, for example "
                "with model.to_empty(device=...) and load_state_dict"
            )


def refuse_several_devices(caller: str, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise a ValueError if the parameters are not all on one device."""
    devices = {parameter.device for parameter in parameters.values()}
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"{caller}: model must be on one device, its parameters are on {found}")


def why_uncompressed(parameters: Mapping[str, torch.nn.Parameter]) -> str:
    """The reason why no compressor takes any of the parameters, as a clause; empty if one takes some of them."""
    dtypes = {in_reals(parameter).dtype for parameter in parameters.values()}
    if not dtypes.isdisjoint(GRAD_DTYPES):
        return ""
    have, take = (", ".join(sorted(map(str, some))).replace("torch.", "") for some in (dtypes, GRAD_DTYPES))
    return f"the parameters have dtype {have}, and compressors take {take}"


def sparse_parameter(model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> str | None:
    """The name of a parameter to which a module of the model says that it gives a sparse gradient; ``None`` if none
    does. :func:`watch_for_sparse_gradients` finds the others."""
    embeddings = (each for each in model.modules() if isinstance(each, torch.nn.Embedding | torch.nn.EmbeddingBag))
    sparse = {id(each.weight) for each in embeddings if each.sparse}
    return next((name for name, each in parameters.items() if id(each) in sparse and each.requires_grad), None)


def refuse_sparse_parameters(caller: str, model: torch.nn.Module, parameters: Mapping[str, torch.nn.Parameter]) -> None:
    """Raise a ValueError that names a parameter if a module of the model gives it a sparse gradient."""
    if (name := sparse_parameter(model, parameters)) is not None:
        raise ValueError(f"{caller}: {sparse(name)}")


def refuse_sparse_gradient(name: str, gradient: torch.Tensor | None) -> None:
    """Raise a RuntimeError if the gradient of the parameter of that name is sparse."""
    if gradient is not None and gradient.layout != torch.strided:
        raise RuntimeError(f"gckernels: {sparse(name)}")


def watch_for_sparse_gradients(parameters: Mapping[str, torch.nn.Parameter]) -> list[RemovableHandle]:
    """Let backward raise a RuntimeError if the first gradient of a parameter is sparse.

    ``torch.nn.functional.embedding`` makes sparse gradients without a module that says so. DDP's own error, which would
    come later, is about memory.

    Returns:
        Handles that remove the hooks of the parameters. A hook removes itself at the first gradient.
    """
    return [_watch(name, parameter) for name, parameter in parameters.items()]


def _watch(name: str, parameter: torch.nn.Parameter) -> RemovableHandle:
    def hook(parameter: torch.Tensor) -> None:
        handle.remove()
        refuse_sparse_gradient(name, parameter.grad)

    handle = on_accumulated(parameter, hook)
    return handle


def on_accumulated(parameter: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]) -> RemovableHandle:
    """The handle of a hook that a parameter calls when its gradient has been accumulated. It is registered now, whether
    the parameter is frozen at present or not."""
    frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    handle: RemovableHandle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(not frozen)
    return handle


def on_accumulated_last(
    parameter: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]
) -> tuple[RemovableHandle, RemovableHandle]:
    """The handles of a hook as of :func:`on_accumulated` that comes behind all others of its kind, also behind those
    that are registered later."""
    handle = on_accumulated(parameter, hook)

    def move_to_end(_: torch.Tensor) -> None:
        hooks = handle.hooks_dict_ref()
        if hooks is not None and handle.id in hooks:
            hooks[handle.id] = hooks.pop(handle.id)  # torch does not see an order by OrderedDict.move_to_end

    is_frozen = not parameter.requires_grad
    parameter.requires_grad_(True)
    move_to_end.__torch_unserializable__ = True  # type: ignore[attr-defined]
    before: RemovableHandle = parameter.register_hook(move_to_end)  # type: ignore[no-untyped-call]
    parameter.requires_grad_(not is_frozen)
    return handle, before


def sparse(name: str) -> str:
    """The words for a parameter that has a sparse gradient, and what to do."""
    return f"parameter {name} has a sparse gradient, which gckernels cannot send; let its embedding have sparse=False"


def _known(module: str, *names: str) -> tuple[type, ...]:
    """Classes of a module, by name. There are none while the module is not imported, since nothing can be an instance
    of them."""
    imported = sys.modules.get(module)
    return tuple(getattr(imported, name) for name in names if hasattr(imported, name))
