"""The front end of models without DistributedDataParallel.

:class:`ModuleFrontend` registers a hook on every parameter. When all gradients of a bucket have been accumulated, it is
launched, in an order that is the same on all ranks and in all steps; when backward ends, gradients are the means.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

import torch
from torch.distributed.utils import _sync_module_states
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ...engine.runtime import Runtime
from ...plans.buckets import BUCKET_NBYTES
from ...plans.plan import Frontend, Plan
from ..abilities import Before
from ..checks.hooks import weakly
from ..frontend import ModelFrontend
from ..members import Members, own_names
from ..request import Request
from .backward import Backward
from .buckets import BROADCAST_NBYTES, Layouts
from .gradient_hooks import GradientHook
from .module_checks import averaged_of, checked_plan, fitting


class ModuleFrontend(ModelFrontend):
    """The hooks of a module's parameters, with their buckets. Construction is collective. Parameters and buffers of the
    module become those of rank 0.
    """

    kind = Frontend.MODULE
    checked_plan = staticmethod(checked_plan)

    def __init__(self, model: torch.nn.Module, plan: Plan, request: Request) -> None:
        super().__init__(model, plan, request)
        self._members = Members(model, averaged_of(model, request.left_out), request.left_out)
        _sync_module_states(model, self.group, BROADCAST_NBYTES, 0, own_names(model, request.left_out))
        self._hooks: list[GradientHook] = []
        self._take(self._new_backward(self.new_runtime(plan)))

    def register(self) -> list[torch.nn.Module]:
        weak = weakref.ref(self)
        self._hooks = [GradientHook(each, _hook(weak, name)) for name, each in self.parameters().items()]
        self._optimizers = register_optimizer_step_pre_hook(weakly(self._before_optimizer))
        return self.modules

    def unregister(self) -> None:
        self._optimizers.remove()

    def close(self) -> None:
        """Remove the hooks. Gradients are local from then on, and another attachment can be made for the same model."""
        for hook in self._hooks:
            hook.remove()
        super().close()
        self._backward.close()

    def model_gone(self) -> None:
        """Close the attachment, but leave the hooks, which raise from then on: parameters may still be in use."""
        hooks, self._hooks = self._hooks, []
        super().model_gone()
        self._hooks = hooks

    @property
    def modules(self) -> list[torch.nn.Module]:
        return self._members.modules

    @property
    def is_outdated(self) -> bool:
        return self._members.have_changed

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        return self._members.registered()

    # ---------------------------------------------------------------- changes of the plan

    def checked(self, request: Request) -> tuple[Plan, list[str]]:
        return fitting(request, self.parameters())

    def prepared(self, runtime: Runtime) -> Callable[[], None]:
        backward = self._new_backward(runtime)
        backward.prepare()

        def install() -> None:
            before = self._backward
            self._take(backward)
            backward.follow(before)
            before.close()

        return install

    def _new_backward(self, runtime: Runtime) -> Backward:
        """The backward passes of a runtime, with its buckets."""
        options = self.request.options
        nbytes = BUCKET_NBYTES if options.bucket_cap_mb is None else options.bucket_cap_mb * 2**20
        layouts = Layouts(runtime, self._members, nbytes)
        return Backward(runtime, self._members, layouts, options.find_unused_parameters, weakly(self._end_step))

    def _take(self, backward: Backward) -> None:
        """Let the runtime of these backward passes execute its plan."""
        self._backward, self.runtime = backward, backward.runtime
        self.averaged_nbytes = backward.nbytes

    # ---------------------------------------------------------------- steps

    @property
    def traceable(self) -> ModuleFrontend:
        return self

    @property
    def groups_to_trace(self) -> tuple[()]:
        return ()

    def launch_late(self, before: Before | None) -> None:
        self._backward.before_late = before

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Look for gradients that an optimizer would use although nobody has averaged them."""
        self._members.look_before(optimizer)
        self._backward.refuse_local(optimizer)

    def _end_step(self) -> None:
        self.averaged_nbytes = self._backward.nbytes
        self.calls.end_step(True)

    @property
    def averages_now(self) -> bool:
        return not self._backward.accumulates_only

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which gradients are accumulated without being synchronised; the first backward outside
        synchronises the sum."""
        before, self._backward.accumulates_only = self._backward.accumulates_only, True
        try:
            yield
        finally:
            self._backward.accumulates_only = before


def _hook(weak: weakref.ref[ModuleFrontend], name: str) -> Callable[[], None]:
    """The hook of a parameter. It refers to nothing that refers to the parameter."""

    def hook() -> None:
        frontend = weak()
        if frontend is None or not frontend.is_open:
            raise RuntimeError(
                f"gckernels: the gradient of {name} is not synchronised any more: the model that was given to attach "
                "is gone; keep the model, or close() the attachment before"
            )
        parameter = frontend._members.references[name]()
        if parameter is not None:
            frontend.calls.deliver(name, parameter)
        frontend._backward.on_gradient(name)

    return hook
