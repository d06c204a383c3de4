"""Another kind of model is a front end and one entry of ``SERVED``: here a model whose gradients come in a list."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gckernels import sync
from gckernels.sync import Frontend, Plan
from gckernels.sync.engine.runtime import Runtime
from gckernels.sync.frontends import kinds
from gckernels.sync.frontends.frontend import ModelFrontend
from gckernels.sync.frontends.members import Members
from gckernels.sync.frontends.module.buckets import Layouts
from gckernels.sync.frontends.module.module_checks import checked_plan, fitting
from gckernels.sync.frontends.request import Request
from models import build
from ranks import run_ranks, values_of

BUCKET_NBYTES = 2**14


class Listed(nn.Module):
    """A model of which somebody else computes the gradients, and gives them in the order of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(64, 64) for _ in range(3))
        self.synchronise: Callable[[Sequence[torch.Tensor]], None] = lambda gradients: None

    def give(self, gradients: Sequence[torch.Tensor]) -> None:
        for parameter, gradient in zip(self.parameters(), gradients, strict=True):
            parameter.grad = gradient
        self.synchronise(gradients)


class ListFrontend(ModelFrontend):
    """The lists of a model's gradients, which are averaged in buckets."""

    kind = Frontend.MODULE
    checked_plan = staticmethod(checked_plan)

    def __init__(self, model: Listed, plan: Plan, request: Request) -> None:
        super().__init__(model, plan, request)
        self.model, self._members = model, Members(model, dict(model.named_parameters()), ())
        self._take(self.new_runtime(plan))

    def register(self) -> Sequence[nn.Module]:
        self.model.synchronise = self.synchronise
        return [self.model]

    def unregister(self) -> None:
        self.model.synchronise = lambda gradients: None

    def parameters(self) -> dict[str, nn.Parameter]:
        return self._members.registered()

    @property
    def averages_now(self) -> bool:
        return True

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def checked(self, request: Request) -> tuple[Plan, list[str]]:
        return fitting(request, self.parameters())

    def prepared(self, runtime: Runtime) -> Callable[[], None]:
        return lambda: self._take(runtime)

    def _take(self, runtime: Runtime) -> None:
        self.runtime, self._layouts = runtime, Layouts(runtime, self._members, BUCKET_NBYTES)
        self._buckets = self._layouts.of(frozenset(self.parameters()))
        self.averaged_nbytes = sum(bucket.vector.nbytes for bucket in self._buckets)

    def synchronise(self, gradients: Sequence[torch.Tensor]) -> None:
        runtime = self.runtime
        messages = [bucket.messages.now() for bucket in self._buckets]
        runtime.begin_step()
        futures = []
        for bucket, built in zip(self._buckets, messages, strict=True):
            bucket.begin()
            for slot in bucket.slots:
                slot.collect(runtime.share, all_reduced=runtime.is_exact)
            futures.append(runtime.submit(built, bucket.vector))
        runtime.end_step()
        for bucket, future in zip(self._buckets, futures, strict=True):
            assert future.wait() is bucket.vector
            for slot in bucket.slots:
                slot.hand_out()
        self.calls.end_step(True)


LISTED = kinds.Served(Frontend.MODULE, lambda model: isinstance(model, Listed), lambda: ListFrontend)


def trained(how: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The sums over all steps of the gradients that came back, and of the means of those that were given."""
    kinds.SERVED.insert(0, LISTED)
    try:
        model = Listed()
        attachment = sync.attach(model, how)
    finally:
        kinds.SERVED.remove(LISTED)
    generator = torch.Generator().manual_seed(dist.get_rank())
    back, want = [], []
    for step in range(6):
        given = [torch.randn(64, 64, generator=generator) for _ in range(3)]
        means = [each.clone() for each in given]
        for each in means:
            dist.all_reduce(each)
        model.give(given)
        back.append(torch.stack([parameter.grad.clone() for parameter in model.parameters()]))
        want.append(torch.stack(means) / dist.get_world_size())
        if step == 3:
            attachment.load_state_dict(attachment.state_dict())
            attachment.change_plan(sync.uniform_plan(model, "BlockQuant"))
    assert attachment.plan.compresses
    attachment.change_plan(sync.uniform_plan(model, "Identity"))
    model.give([torch.zeros(64, 64) for _ in range(3)])  # residuals are sent as well
    assert attachment.steps == 7 and not attachment.is_changing and not attachment.plan.compresses
    back.append(torch.stack([parameter.grad.clone() for parameter in model.parameters()]))
    attachment.close()
    model.give([torch.ones(64, 64) for _ in range(3)])  # nobody averages
    assert all(bool((parameter.grad == 1).all()) for parameter in model.parameters())
    return back, want


@pytest.mark.parametrize("how", ["Identity", "BlockQuant(bits=4)", "TopK(ratio=0.05)"])
def test_gradients_in_a_list_are_averaged_and_nothing_is_lost(how):
    outcomes = values_of(run_ranks(2, trained, how))
    for back, want in outcomes:
        torch.testing.assert_close(sum(back), sum(want), rtol=1e-4, atol=1e-4)
        assert how == "Identity" or not torch.allclose(back[2], want[2], atol=1e-2)  # it was compressed
    first, second = (back for back, _ in outcomes)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_other_models_are_served_as_before():
    assert [kinds.kind_of(each) for each in (build("Mlp"), 3)] == [Frontend.MODULE] * 2
    assert kinds.frontend_of(build("Mlp")).__name__ == "ModuleFrontend"
