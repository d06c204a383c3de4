"""Hooks that parameters call when their gradients are there.

DDP has its hooks at the nodes of autograd that accumulate gradients, which run them after all hooks of the tensor. Such
a node lives no longer than a graph, and to keep it would keep the parameter alive. So a hook of the parameter, which
comes before its gradient is accumulated, registers the other one at the node that runs now, behind all that this node
has by then.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

_COMPILED = (
    "gckernels: compiled autograd is not supported for a bare module, as its gradients cannot be seen there; compile "
    "the model without torch._dynamo.config.compiled_autograd"
)


class GradientHook:
    """A hook that a parameter calls when its gradient has been accumulated, after all its other hooks.

    Args:
        parameter: the parameter, which may be frozen at present, and is not kept.
        hook: what is called, in every backward that comes to the parameter, also if it brings no gradient. It refers to
            nothing that refers to the parameter.
    """

    __torch_unserializable__ = True  # a process that gets the parameter gets no hook

    def __init__(self, parameter: torch.nn.Parameter, hook: Callable[[], None]) -> None:
        self._hook = hook
        self._at_node: RemovableHandle | None = None
        is_frozen = not parameter.requires_grad
        parameter.requires_grad_(True)
        self._handle: RemovableHandle = parameter.register_hook(self)  # type: ignore[no-untyped-call]
        parameter.requires_grad_(not is_frozen)

    def remove(self) -> None:
        """Remove the hook."""
        self._handle.remove()
        self._leave_node()

    def __call__(self, gradient: torch.Tensor | None) -> None:
        """Get to the node that runs now. The gradient has not been accumulated yet.

        Raises:
            RuntimeError: there is none, because the backward has been compiled.
        """
        node = torch._C._current_autograd_node()
        if node is None or not hasattr(node, "variable"):
            raise RuntimeError(_COMPILED)
        self._leave_node()  # an earlier backward has failed, or was one of torch.autograd.grad
        self._at_node = node.register_hook(self._accumulated)

    def _accumulated(self, *_: object) -> None:
        self._leave_node()
        self._hook()

    def _leave_node(self) -> None:
        if self._at_node is not None:
            self._at_node.remove()
            self._at_node = None
