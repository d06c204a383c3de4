"""A parameter is synchronised once, for as long as its model lives, and the model stays as it was."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gckernels import BlockQuant, Identity
from gckernels.sync import Attachment, attach
from leftovers import lanes
from models import Mlp, build
from ranks import run_ranks, values_of
from workloads import digest_of, summed

STEPS = 3


def trained(model: nn.Module, module: nn.Module | None = None) -> list[str]:
    """Train for some steps and return the digests of each step's gradients."""
    digests = []
    for step in range(STEPS):
        model.zero_grad()
        model(Mlp.batch(step, dist.get_rank())).backward()
        digests.append(digest_of(parameter.grad for parameter in (module or model).parameters()))
    return digests


# -------------------------------------------------------------------- lifetime


def synchronised_by_itself() -> None:
    """An attachment lives as long as its parameters do, even if nothing else refers to it or to the module that it was
    given."""
    module = build("Mlp")
    kept = attach(module, BlockQuant())
    expected = trained(module)
    kept.close()
    for around in (lambda it: it, lambda it: nn.Sequential(it), lambda it: nn.ModuleList([it])):
        module = build("Mlp")
        attach(around(module), BlockQuant())
        gc.collect()
        assert trained(module) == expected
        del module
        gc.collect()
        assert not lanes()


def test_the_model_keeps_its_attachment():
    values_of(run_ranks(2, synchronised_by_itself))


class Remembering(nn.Module):
    """A model in reference cycles: with itself, with its attachment, and with the hooks of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(23, 7)
        self.me: Any = [self]
        self.seen = 0
        self.layer.weight.register_hook(lambda grad: self.see())
        self.layer.bias.register_post_accumulate_grad_hook(_Forgets(self))

    def see(self) -> None:
        self.seen += 1

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return nn.functional.cross_entropy(self.layer(batch["x"]), batch["y"])


class _Forgets:
    """A hook that does not keep the module alive; torch does not see through cycles of such hooks."""

    def __init__(self, module: Remembering) -> None:
        self._module = weakref.ref(module)

    def __call__(self, parameter: torch.Tensor) -> None:
        module = self._module()
        assert module is not None
        module.see()


ALL = list(itertools.product((False, True), repeat=3))
PAIRS = [each for each in ALL if sum(each) % 2]
"""Every pair of two settings."""


def freed(settings: list[tuple[bool, bool, bool]]) -> None:
    for by_hook, is_remembering, keeps in settings:
        module: Any = Remembering() if is_remembering else build("Mlp")
        model = DistributedDataParallel(module) if by_hook else module
        front = attach(model, BlockQuant())
        module.front = front if keeps else None
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        trained(model, module)
        optimizer.step()
        if is_remembering:
            optimizer = None  # the optimizer holds the parameters, whose hooks hold the model
        assert lanes()
        parameters = [weakref.ref(parameter) for parameter in module.parameters()]
        gone = [weakref.ref(each) for each in (module, model, front, front._frontend.runtime)]
        del module, model, front
        gc.collect()
        assert not lanes() and [each() for each in gone] == [None] * 4
        assert all((each() is None) == (optimizer is None) for each in parameters)
        del optimizer
        gc.collect()
        assert [each() for each in parameters] == [None] * len(parameters)


@pytest.mark.host_only("lanes of a device are no threads")
@pytest.mark.parametrize("settings", [PAIRS, pytest.param(ALL, marks=pytest.mark.slow)], ids=["pairs", "all"])
def test_with_the_model_all_is_freed(settings):
    values_of(run_ranks(2, freed, settings))


def gone_too_early() -> None:
    parameters = [nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(3))]
    attach(nn.ParameterList(parameters), Identity())
    gc.collect()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"gradient of [01] is not synchronised any more: the model .* is gone"):
            sum(parameter.sum() for parameter in parameters).backward()
    again = nn.ParameterList(parameters)
    with pytest.raises(RuntimeError, match="is gone"):
        attach(again, Identity())
        sum(parameter.sum() for parameter in parameters).backward()


def test_parameters_that_outlive_their_model_say_so():
    values_of(run_ranks(2, gone_too_early))


# -------------------------------------------------------------------- the model is unchanged


def copied() -> None:
    for by_hook in (False, True):
        module = build("Mlp")
        keys, size = list(module.state_dict()), len(pickle.dumps(module))
        model = DistributedDataParallel(module) if by_hook else module
        front = attach(model, BlockQuant())
        expected = trained(model, module)
        module.zero_grad()
        assert list(module.state_dict()) == keys
        pickled = pickle.dumps(module)
        assert len(pickled) == size and b"gckernels" not in pickled
        for other in (copy.deepcopy(module), pickle.loads(pickled)):
            mine = int(trained(other)[0][:12], 16)
            assert summed(torch.tensor(mine)).item() != 2 * mine  # the gradients differ between ranks
            again = attach(other, BlockQuant())
            assert trained(other) == expected
            again.close()
        front.close()


def test_copies_of_a_model_are_free():
    values_of(run_ranks(2, copied))


# -------------------------------------------------------------------- parameters are claimed once


def ddp(module: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(module)


class Subclass(DistributedDataParallel):
    pass


def ours(module: nn.Module) -> Attachment:
    return attach(module, Identity())


def hooked(module: nn.Module) -> Any:
    model = ddp(module)
    return model, attach(model, Identity())


TAKEN = "parameter {} is synchronised by another attachment"
WRAPPED = "parameter {} is averaged by a DistributedDataParallel model, too"
TWICE: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any], str]] = {
    # the model's first attachment, the second one, which is refused, and the reason
    "two of the same module": (ours, ours, TAKEN.format("layers.0.weight")),
    "one of a module and one of a part": (ours, lambda module: ours(module.layers[2]), TAKEN.format("weight")),
    "one of a part and one of the module": (
        lambda module: ours(module.layers[2]),
        ours,
        TAKEN.format("layers.2.weight"),
    ),
    "one of a module and one of DDP": (ours, hooked, TAKEN.format("layers.0.weight")),
    "one of DDP and one of its module": (hooked, ours, TAKEN.format("layers.0.weight")),
    "one of DDP and one of a part": (hooked, lambda module: hooked(module.layers[4]), TAKEN.format("weight")),
    "DDP and an attachment": (ddp, ours, WRAPPED.format("layers.0.weight")),
    "DDP of a part and an attachment": (
        lambda module: ddp(module.layers[2]),
        ours,
        WRAPPED.format("layers.2.weight"),
    ),
    "DDP and an attachment to a part": (ddp, lambda module: ours(module.layers[2]), WRAPPED.format("weight")),
    "a subclass of DDP and an attachment": (Subclass, ours, WRAPPED.format("layers.0.weight")),
}


def close(what: Any) -> None:
    dist.barrier()  # Gloo must not close connections that another rank is still opening
    for each in what if isinstance(what, tuple) else (what,):
        if not isinstance(each, DistributedDataParallel):
            each.close()


def twice() -> dict[str, list[str]]:
    """For every pair of attachments the error if both ranks made the first one, and for every third pair the error if
    rank 1 alone did."""
    rank, found = dist.get_rank(), {}
    for number, (name, (first, second, _)) in enumerate(TWICE.items()):
        errors = list[str]()
        for on_both in (True,) if number % 3 else (True, False):
            module, elsewhere = build("Mlp"), build("Mlp")
            has = first(module if on_both or rank == 1 else elsewhere)
            try:
                second(module)
                errors.append("nothing was raised")
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
            close(has)
        has = None
        close(second(module))  # the model is free now
        assert not lanes()
        found[name] = errors
    return found


def test_no_parameter_is_synchronised_twice():
    for rank, found in enumerate(values_of(run_ranks(2, twice, group_timeout_s=20))):
        for name, (_, _, expected) in TWICE.items():
            on_both, *on_one = found[name]
            assert on_both.startswith("ValueError: ") and expected in on_both, name
            for each in on_one:
                assert each.startswith("ValueError: " if rank == 1 else "RuntimeError: ") and expected in each, name


def wrapped_since() -> None:
    module = build("Mlp")
    attachment = ours(module)
    model = ddp(module)
    with pytest.raises(ValueError, match=WRAPPED.format(r"layers\.0\.weight")):
        trained(model)
    attachment.close()


def test_a_model_that_is_wrapped_afterwards():
    values_of(run_ranks(2, wrapped_since))


def side_by_side() -> None:
    """Several attachments may synchronise one model if no two of them average the same parameter."""
    module = build("Mlp")
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["layers.2.weight", "layers.2.bias"])
    model = ddp(module)
    of_ddp, of_part = attach(model, BlockQuant()), attach(module.layers[2], BlockQuant())
    expected = build("Mlp")
    alone = attach(expected, BlockQuant())
    assert trained(model, module) == trained(expected)
    for front in (of_ddp, of_part, alone):
        front.close()
    with pytest.raises(ValueError, match=WRAPPED.format(r"layers\.0\.weight")):
        ours(module)  # the model is plain DDP again
    del model
    again = ours(module)
    assert trained(module)
    again.close()


def test_parts_of_a_model_by_themselves():
    values_of(run_ranks(2, side_by_side))
