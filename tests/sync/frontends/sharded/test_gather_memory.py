"""Memory of gathers is given to other parameters only when FSDP has no more use for what was gathered into it.

FSDP is asked to gather ahead, in vain, in any order, for one of several roots, and from some of the ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from gckernels import BlockQuant, sync
from gckernels.sync.frontends.sharded.gathers import Gathers
from gckernels.sync.messages.gathers import GatheredParameter
from ranks import run_ranks, values_of
from sharded_models import fsdp_modules
from workloads import digest_of

Use = Callable[[Any, torch.Tensor, Any], torch.Tensor]
"""Does a step with a model, inputs and the attachment or ``None``. Returns what is compared."""


class Chain(nn.Module):
    """Blocks one behind the other, and one whose output is not a part of the result."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(5))
        self.probe = nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4), probes: bool = True) -> Any:
        for index in order:
            if index < 0:
                raise ArithmeticError
            inputs = self.blocks[index](inputs)
            if index == 1 and probes:
                probed = self.probe(inputs)
        return (inputs, probed) if probes else (inputs, torch.zeros(()))


def flagged(net: Any, inputs: torch.Tensor, attachment: Any) -> torch.Tensor:
    """Two microbatches, of which FSDP is told the last."""
    outputs = []
    for last in (False, True):
        net.set_is_last_backward(last)
        result, probed = net(inputs + last)
        (result.square().mean() + (probed.square().mean() if last else 0)).backward()
        outputs += [result.detach(), probed.detach()]
    return torch.stack(outputs)


def evaluated_between(net: Any, inputs: torch.Tensor, attachment: Any) -> torch.Tensor:
    """A microbatch, an evaluation without the block that FSDP has gathered in vain, and another microbatch."""
    net.set_is_last_backward(False)
    net(inputs)[0].square().mean().backward()
    with torch.no_grad():
        seen = net(inputs, probes=False)[0]
    net.set_is_last_backward(True)
    result, probed = net(inputs)
    (result.square().mean() + probed.square().mean()).backward()
    return torch.stack([seen, result.detach(), probed.detach()])


def out_of_order(net: Any, inputs: torch.Tensor, attachment: Any) -> torch.Tensor:
    """Blocks in another order than that in which they are gathered ahead, and one of them twice."""
    result = net(inputs, order=(3, 1, 0, 2, 1, 4), probes=False)[0]
    result.square().mean().backward()
    return result.detach()


def failed_in_forward(net: Any, inputs: torch.Tensor, attachment: Any) -> torch.Tensor:
    """A forward that fails while parameters are on their way, and one that does not."""
    with contextlib.suppress(ArithmeticError):
        net(inputs, order=(0, 1, -1))
    for part in fsdp_modules(net):
        part._get_fsdp_state()._state_ctx.iter_forward_root = None  # as torch's own recovery does
    return out_of_order(net, inputs, attachment)


def ahead_and_in_vain(net: Any, inputs: torch.Tensor, attachment: Any) -> torch.Tensor:
    """Blocks that are gathered before the step and used in another order, or not at all in this one."""
    handles = [net.blocks[index].unshard(async_op=True) for index in (4, 0)] + [net.probe.unshard(async_op=True)]
    result = net(inputs, probes=False)[0]
    result.square().mean().backward()
    del handles
    return torch.cat([result.detach(), net(inputs)[1].detach()])


def changed_between(net: Any, inputs: torch.Tensor, attachment: Any) -> torch.Tensor:
    """A change of the plan while parameters that were gathered are kept."""
    handle = net.blocks[3].unshard(async_op=True)
    if attachment is not None:
        attachment.change_plan(sync.uniform_plan(net, "Identity"))
    result = net(inputs)[0]
    handle.wait()
    result.square().mean().backward()
    return result.detach()


AHEAD: dict[Use, int] = {
    flagged: 0,
    evaluated_between: 0,
    out_of_order: 2,
    failed_in_forward: 2,
    ahead_and_in_vain: 0,
    changed_between: 0,
}
"""The number of blocks that each block gathers ahead, by use; with 0, FSDP chooses one in backward."""


def _sharded(prefetched: int, **options: Any) -> Any:
    torch.manual_seed(0)
    net: Any = Chain()
    for each in (*net.blocks, net.probe, net):
        fully_shard(each, **options)
    for index, block in enumerate(net.blocks):
        block.set_modules_to_backward_prefetch(
            [net.blocks[index - 1 - ahead] for ahead in range(min(prefetched, index))]
        )
        block.set_modules_to_forward_prefetch(list(net.blocks[index + 1 : index + 1 + prefetched]))
    return net


def trained(use: Use, spec: str | None, prefetched: int, steps: int = 3, **options: Any) -> list[torch.Tensor]:
    """Figures of steps, and the parameters behind them."""
    net = _sharded(prefetched, **options.pop("sharding", {}))
    attachment = None if spec is None else sync.attach(net, spec, **options)
    generator, found = torch.Generator().manual_seed(dist.get_rank()), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        found.append(use(net, torch.randn(8, 16, generator=generator), attachment))
        optimizer.step()
        optimizer.zero_grad()
    if attachment is not None:
        attachment.close()
    return [*found, *(each.full_tensor().detach() for each in net.parameters())]


def compared(others: bool) -> dict[str, tuple[bool, float]]:
    """By use: whether an attachment that compresses nothing changes nothing, and the error of encoded parameters."""
    found = {}
    for use, ahead in AHEAD.items():
        prefetched = 2 - ahead if others else ahead
        alone, exact = (trained(use, spec, prefetched) for spec in (None, "Identity"))
        encoded = trained(use, "Identity", prefetched, weights="BlockQuant(bits=4)")
        errors = [float((a - b).norm() / (b.norm() + 1e-9)) for a, b in zip(encoded, alone, strict=True)]
        found[use.__name__] = digest_of(exact) == digest_of(alone), max(errors)
    return found


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_fsdp_keeps_is_left_alone(others):
    for found in values_of(run_ranks(2, compared, others)):
        for name, (is_same, error) in found.items():
            assert is_same, name
            assert error < 0.15, (name, error)


def of_two_roots(spec: str | None, weights: str | None = None) -> torch.Tensor:
    """Figures of a training in two roots, of which the second is gathered before the first one's backward."""
    torch.manual_seed(0)
    stages: Any = nn.ModuleList(nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))) for _ in range(2))
    for stage in stages:
        for each in (*stage, stage):
            fully_shard(each)
    attachment = None if spec is None else sync.attach(stages, spec, weights=weights)
    optimizer, found = torch.optim.SGD(stages.parameters(), lr=0.1), []
    for step in range(3):
        inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        first = stages[0](inputs)
        handle = stages[1][0].unshard(async_op=True) if step else None  # not before its root is known
        first.square().mean().backward()
        with torch.no_grad():
            found.append(stages[0](inputs))
        if handle is not None:
            handle.wait()
        second = stages[1](first.detach())
        with torch.no_grad():  # copies parameters out, while the second root's streams follow its forward alone
            found.append(stages[0](inputs + 1))
        second.square().mean().backward()
        found += [first.detach(), second.detach()]
        optimizer.step()
        optimizer.zero_grad()
    if attachment is not None:
        attachment.close()
    return torch.stack(found)


def compared_roots() -> tuple[bool, float]:
    """Whether an attachment that compresses nothing changes nothing, and the error of encoded parameters."""
    alone, exact = of_two_roots(None), of_two_roots("Identity")
    encoded = of_two_roots("Identity", weights="BlockQuant(bits=4)")
    return torch.equal(alone, exact), float((encoded - alone).norm() / alone.norm())


def test_a_root_that_is_gathered_ahead_keeps_its_parameters():
    for is_same, error in values_of(run_ranks(2, compared_roots)):
        assert is_same and error < 0.15


def from_some_ranks() -> tuple[str, ...]:
    use = functools.partial(trained, out_of_order, prefetched=2, steps=1)
    return tuple(digest_of(use(spec=spec, sharding={"reshard_after_forward": 2})) for spec in (None, "Identity"))


def test_gathers_from_some_ranks_ahead_are_left_to_fsdp():
    for alone, attached in values_of(run_ranks(4, from_some_ranks)):
        assert attached == alone


class Borrower:
    """A group of parameters of 64 elements in each row, of which FSDP keeps what was gathered."""

    def __init__(self) -> None:
        assert dist.group.WORLD is not None
        self.gathering, self.gathered, self.names = dist.group.WORLD, None, ["a"]

    def rows(self) -> list[int]:
        return [64]


def lent() -> dict[str, bool]:
    """The use of memory while FSDP keeps it, while a gather into it is on its way, and afterwards."""
    groups: Any = [Borrower(), Borrower()]
    gathers = Gathers(groups[0].gathering, torch.get_default_device(), groups)
    gathers.encode([[GatheredParameter("a", 0, 64, BlockQuant())]] * 2)
    room = functools.partial(gathers.room, numel=128, dtype=torch.float32)
    first = room(0)
    assert first is not None
    first.view(2, 64)[dist.get_rank()] = float(dist.get_rank())
    groups[0].gathered, work = first, gathers.gather(0, first)
    found, other = {}, room(1)
    assert work is not None and other is not None
    found["kept"] = other.data_ptr() != first.data_ptr()
    work.wait()
    future = gathers._buffers[0].future
    found["value"] = future is not None and future.value() is first  # on a device, streams wait for what is in a value
    found["rows"] = bool((first.view(2, 64) == torch.tensor([[0.0], [1.0]])).all())
    groups[1].gathered = other
    again = room(1)
    found["kept when it has arrived"] = again is not None and again.data_ptr() not in (
        first.data_ptr(),
        other.data_ptr(),
    )
    groups[0].gathered = None
    given = room(1)
    found["given when it is copied out"] = given is not None and given.data_ptr() == first.data_ptr()
    gathers.close()
    return found


def test_memory_is_lent_while_it_is_in_use():
    for found in values_of(run_ranks(2, lent)):
        assert all(found.values()), found
