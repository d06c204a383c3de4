"""The parameters of a model as tensors of a trace, with their roles."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from torch import nn

from ..plans.strides import in_reals, memory_shape
from .model_trace import ModelTrace
from .traced_tensors import Role, TracedTensor


def unmeasured(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> ModelTrace:
    """A trace of a model of which nothing is measured: without times, norms and errors.

    Args:
        module: the model.
        parameters: its parameters, by name.
    """
    order = [*parameters][::-1]  # about that in which gradients are ready
    roles = roles_of(module, parameters, order)
    return ModelTrace(
        type(module).__name__, tuple(traced_tensor(each, parameters[each], 0.0, roles[each]) for each in order), 0.0
    )


def traced_tensor(name: str, parameter: nn.Parameter, ready_s: float, role: Role) -> TracedTensor:
    """The gradient of a parameter, which is ready ``ready_s`` after backward has begun."""
    real = in_reals(parameter)
    return TracedTensor(name, real.numel(), ready_s, memory_shape(real), real.dtype, role)


def roles_of(
    module: nn.Module, parameters: Mapping[str, nn.Parameter], backward_order: Iterable[str]
) -> dict[str, Role]:
    """The role of every parameter, by name.

    The output is the weight of the last ``nn.Linear``, the first one whose gradient is ready. A model whose last layer
    has the weight of an embedding has none: that weight is an embedding.

    Matrices of other classes than those of ``torch.nn`` may have any role (:func:`unclassified`). One counts as an
    embedding if no other has the same name but for its numbers, as layers have; if its gradient is the last one of them
    that is ready, and there is no ``nn.Embedding``; or if it is the first one, and there is no ``nn.Linear``.

    Args:
        module: the model.
        parameters: its parameters, by name.
        backward_order: the names, in the order in which the gradients are ready.
    """
    modules, order = list(module.modules()), list(backward_order)
    embeddings = {id(each.weight) for each in modules if isinstance(each, nn.Embedding | nn.EmbeddingBag)}
    linear = {id(each.weight) for each in modules if isinstance(each, nn.Linear)}
    roles = {name: Role.VECTOR if each.dim() < 2 else Role.WEIGHT for name, each in parameters.items()}
    roles |= dict.fromkeys((name for name, each in parameters.items() if id(each) in embeddings), Role.EMBEDDING)
    if not embeddings & linear:
        last = next((name for name in order if id(parameters[name]) in linear), None)
        if last is not None:
            roles[last] = Role.OUTPUT
    unknown = unclassified(module, parameters)
    kinds = Counter(map(_without_numbers, unknown))
    spared = [name for name in unknown if kinds[_without_numbers(name)] == 1]
    ready = [name for name in order if name in unknown]
    ends = (ready[:1] if not linear else []) + (ready[-1:] if not embeddings else [])
    return roles | dict.fromkeys([*spared, *ends], Role.EMBEDDING)


def unclassified(module: nn.Module, parameters: Mapping[str, nn.Parameter]) -> set[str]:
    """The names of matrices that belong to no class of ``torch.nn``, which would say what they are for.

    Args:
        module: the model.
        parameters: its parameters, by name.
    """
    known = {id(each) for part in module.modules() if _is_of_torch(part) for each in part.parameters(recurse=False)}
    return {name for name, each in parameters.items() if each.dim() > 1 and id(each) not in known}


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "", name)


def _is_of_torch(module: nn.Module) -> bool:
    """Whether a module is of a class of ``torch.nn``, or derived from one, that says what its parameters are for."""
    homes = (each.__module__ for each in type(module).__mro__ if each is not nn.Module)
    return any(home.startswith("torch.nn.") and not home.endswith(".container") for home in homes)
