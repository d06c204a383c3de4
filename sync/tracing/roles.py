"""Roles of a model's parameters, found from its modules and from the order of their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from ..traces.model_trace import Role


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
