"""The parameters of a model as tensors of a trace, with their roles."""

from __future__ import annotations

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

    Args:
        module: the model.
        parameters: its parameters, by name.
        backward_order: the names, in the order in which the gradients are ready.
    """
    modules = list(module.modules())
    embeddings = {id(each.weight) for each in modules if isinstance(each, nn.Embedding | nn.EmbeddingBag)}
    linear = {id(each.weight) for each in modules if isinstance(each, nn.Linear)}
    roles = {}
    for name, parameter in parameters.items():
        if id(parameter) in embeddings:
            roles[name] = Role.EMBEDDING
        else:
            roles[name] = Role.VECTOR if parameter.dim() < 2 else Role.WEIGHT
    if not embeddings & linear:
        last = next((name for name in backward_order if id(parameters[name]) in linear), None)
        if last is not None:
            roles[last] = Role.OUTPUT
    return roles
