"""A step of a bare module ends with the outermost backward, has all gradients that are there, and fails aloud."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gckernels import sync
from gckernels.sync.frontends.module.passes import Passes
from models import SMALL_BUCKETS
from ranks import run_ranks, values_of
from workloads import digest_of, summed

STEPS = 6


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * number + dist.get_rank()))


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise MemoryError("out of memory")


class Blocks(nn.Module):
    """Blocks that may be dropped, run in reentrant checkpoints, and lie in checkpoints of more of them."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 2).requires_grad_(False)
        self.depth, self.fails = depth, False

    def run(self, block: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, depth: int) -> torch.Tensor:
        if not depth:
            return block(hidden)
        inner = copy.copy(block) if depth == 1 else lambda inputs: self.run(block, inputs, depth - 1)
        output: torch.Tensor = checkpoint(inner, hidden, use_reentrant=True)
        return output

    def forward(self, x: torch.Tensor, dropped: list[int]) -> torch.Tensor:
        hidden = self.first(x)
        for index, block in enumerate(self.blocks):
            if index == 1 and self.fails:
                hidden = _Fails.apply(hidden)
            if index not in dropped:
                hidden = hidden + self.run(block, hidden, self.depth)
        return self.head(torch.tanh(hidden)).square().mean()


def _dropped(pattern: str, step: int) -> list[int]:
    turn = step + dist.get_rank()
    if pattern == "first and last":
        return [turn % 4] if turn % 2 else [0, 3]
    return [turn % 4] if pattern == "one" or (pattern == "some" and turn % 3 == 0) else []


def checkpointed(depth: int, pattern: str) -> None:
    """Train with blocks that ranks drop; the gradients are the means, in as many steps as backwards."""
    module, other = Blocks(depth), Blocks(0)
    attachment = sync.attach(module, "Identity", find_unused_parameters=True, bucket_cap_mb=SMALL_BUCKETS)
    for step in range(STEPS):
        module.zero_grad()
        other.zero_grad()
        for model in (module, other):
            model(batch(step), _dropped(pattern, step)).backward()
        for mine, alone in zip(module.parameters(), other.parameters(), strict=True):
            if mine.requires_grad:
                grad = torch.zeros_like(alone) if alone.grad is None else alone.grad
                expected = summed(grad) / dist.get_world_size()
                torch.testing.assert_close(torch.zeros_like(mine) if mine.grad is None else mine.grad, expected)
    assert attachment.steps == STEPS
    attachment.close()


def all_checkpointed(patterns: list[str]) -> None:
    for pattern in patterns:
        for depth in (1, 2):
            checkpointed(depth, pattern)


@pytest.mark.parametrize(
    "patterns", [["one", "some"], pytest.param(["none", "first and last"], marks=pytest.mark.slow)], ids=", ".join
)
def test_reentrant_checkpoints_do_not_end_a_step(patterns):
    values_of(run_ranks(2, all_checkpointed, patterns, group_timeout_s=60))


# -------------------------------------------------------------------- backwards that fail


def failed(finds: bool, depth: int, keeps: bool) -> list[str]:
    """The errors of what follows a backward that fails on all ranks after some gradients; training goes on in another
    attachment, with parameters that are the same."""
    module = Blocks(depth)
    attachment = sync.attach(module, "EFSignSGD", find_unused_parameters=finds)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    kept, texts = [], []

    def step(number: int, dropped: list[int]) -> None:
        optimizer.zero_grad()
        loss = module(batch(number), dropped)
        kept.extend([loss] if keeps else [])
        loss.backward()

    for number in range(2):
        step(number, [])
        optimizer.step()
    module.fails = True
    with pytest.raises(MemoryError):
        step(2, [])
    module.fails = False
    with pytest.raises(RuntimeError) as raised:
        optimizer.step()
    texts.append(str(raised.value))
    for number in (3, 4):  # the first of them has other parameters where they may be unused
        with pytest.raises(RuntimeError) as raised:
            step(number, [1, 2, 3] if finds and number == 3 else [])
            optimizer.step()
        texts.append(str(raised.value))
    attachment.close()
    attachment = sync.attach(module, "EFSignSGD", find_unused_parameters=finds)
    step(5, [])
    optimizer.step()
    attachment.close()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest_of(module.parameters()))
    assert len(set(digests)) == 1
    return texts


def test_a_failed_backward_is_seen_while_the_thread_of_a_device_keeps_it():
    passes, kept, weight = Passes(lambda: None), list[object](), torch.ones(1, requires_grad=True)

    def fail(grad: torch.Tensor) -> None:
        passes.see()
        kept.extend(end() for end in passes._ends.values())
        assert not passes.have_failed
        raise MemoryError

    weight.register_hook(fail)
    with pytest.raises(MemoryError):
        weight.sum().backward()
    assert kept and passes.have_failed


def unnoticed(depth: int) -> str:
    """The error of the first backward after one that has failed, if the training has no optimizer of torch."""
    module = Blocks(depth)
    attachment = sync.attach(module, "Identity", find_unused_parameters=True)
    module.fails = True
    loss = module(batch(0), [])
    with pytest.raises(MemoryError):
        loss.backward()
    module.fails = False
    with pytest.raises(RuntimeError) as raised:  # while the graph of the one before is kept
        module(batch(1), [1, 2, 3]).backward()
    attachment.close()
    return str(raised.value)


def all_failed() -> list[str]:
    cases = [(finds, depth, keeps) for finds in (True, False) for depth in (0, 1) for keeps in (False, True)]
    return [text for case in cases for text in failed(*case)] + [unnoticed(depth) for depth in (0, 1, 2)]


def test_a_backward_that_has_failed_is_noticed_at_once():
    for texts in values_of(run_ranks(2, all_failed, group_timeout_s=60)):
        assert all("has failed" in text and "close()" in text for text in texts), texts


def refused(finds: bool, launches: bool) -> None:
    """Freeze a layer before the backward that comes to it in the middle. If nothing has been launched before, its
    gradients are averaged with those of the next backward, and no optimizer uses them before; else nothing is averaged
    any more."""
    module = Blocks(0)
    alone = copy.deepcopy(module)
    plan = sync.uniform_plan(module, "Identity", program="allreduce")
    cap = 0.0004 if launches else None
    attachment = sync.attach(module, plan, find_unused_parameters=finds, bucket_cap_mb=cap)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    loss = module(batch(0), [])
    module.blocks[1].requires_grad_(False)
    for use in (loss.backward, optimizer.step):
        with pytest.raises(RuntimeError, match=r"gradient of blocks\.1\.(bias|weight) came, which is frozen"):
            use()
    module.blocks[1].requires_grad_(True)
    if launches:
        with pytest.raises(RuntimeError, match=r"which is frozen.* close\(\) the attachment and attach again"):
            module(batch(1), []).backward()
        return attachment.close()
    arrived = [name for name, each in module.named_parameters() if each.grad is not None]
    module(batch(1), []).backward()
    for number in range(2):
        before = {name: each.grad for name, each in alone.named_parameters()}
        alone.zero_grad()
        alone(batch(number), []).backward()
        for name, each in alone.named_parameters():
            if each.grad is not None and before[name] is not None and name in arrived:
                each.grad += before[name]
    assert len(arrived) == 4
    for mine, other in zip(module.parameters(), alone.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, summed(other.grad) / dist.get_world_size())
    optimizer.step()
    return attachment.close()


def all_refused() -> None:
    for finds in (True, False):
        for launches in (True, False):
            refused(finds, launches)


@pytest.mark.host_only("nothing is used on a device after an error")
def test_a_backward_that_was_refused_before_anything_was_sent_counts_as_one_that_only_accumulated():
    values_of(run_ranks(2, all_refused, group_timeout_s=60))


def early() -> str:
    """The error of an optimizer that steps while gradients of the step are missing."""
    module = Blocks(0)
    attachment = sync.attach(module, "Identity")
    module(batch(0), [2]).backward()
    with pytest.raises(RuntimeError) as raised:
        torch.optim.SGD(module.parameters(), lr=0.1).step()
    attachment.close()
    return str(raised.value)


def test_an_optimizer_does_not_use_gradients_that_are_not_averaged_yet():
    for text in values_of(run_ranks(2, early)):
        assert "none came for blocks.2.bias, blocks.2.weight" in text and "find_unused_parameters=True" in text


# -------------------------------------------------------------------- gradients that are there


def frozen_between(finds: bool, zeroes: bool) -> None:
    """Freeze a layer between a micro-batch that only accumulates and a synchronised one. The gradients are
    the means of those that ranks have alone."""
    module = Blocks(0)
    other = copy.deepcopy(module)
    attachment = sync.attach(module, "Identity", find_unused_parameters=finds, bucket_cap_mb=SMALL_BUCKETS)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (module, other)]
    for number in range(3):
        for model, apart in ((other, contextlib.nullcontext), (module, attachment.no_sync)):
            model.requires_grad_(True)
            with apart():
                model(batch(2 * number), []).backward()
            if zeroes:
                model.zero_grad()
            model.blocks[number].requires_grad_(False)
            model(batch(2 * number + 1), []).backward()
        for mine, alone in zip(module.parameters(), other.parameters(), strict=True):
            assert (mine.grad is None) == (alone.grad is None)
            if alone.grad is not None:
                alone.grad = summed(alone.grad) / dist.get_world_size()
                torch.testing.assert_close(mine.grad, alone.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert attachment.steps == 3
    attachment.close()


def all_frozen_between() -> None:
    for finds in (True, False):
        for zeroes in (True, False):
            frozen_between(finds, zeroes)


def test_what_was_frozen_since_its_gradient_came_is_averaged():
    values_of(run_ranks(2, all_frozen_between))


def by_hand(spec: str) -> list[str]:
    """Gradients that are kept, or written by hand, of a layer that one rank uses; they are those of DDP."""
    digests = []
    for is_ddp in (True, False):
        module = Blocks(0)
        model: Any = DistributedDataParallel(module, find_unused_parameters=True) if is_ddp else module
        options = {} if is_ddp else {"find_unused_parameters": True}
        sync.attach(model, sync.uniform_plan(model, spec, program="allgather", exempt=None), start_step=1, **options)
        for number in range(4):
            module.zero_grad(set_to_none=number % 2 == 0)
            for micro in range(2):
                dropped = [] if micro == 0 or dist.get_rank() == number % 2 else [1, 2]
                model(batch(2 * number + micro), dropped).backward()
            for parameter in module.blocks[3].parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + dist.get_rank())
            model(batch(number), [3] if dist.get_rank() else []).backward()
            digests.append(digest_of(each.grad for each in module.parameters()))
    return digests


@pytest.mark.parametrize("spec", ["EFSignSGD", pytest.param("BlockQuant(bits=4)", marks=pytest.mark.slow)])
def test_gradients_that_are_there_are_averaged(spec):
    found = values_of(run_ranks(2, by_hand, spec))
    assert found[0] == found[1]
    half = len(found[0]) // 2
    assert found[0][:half] == found[0][half:]
