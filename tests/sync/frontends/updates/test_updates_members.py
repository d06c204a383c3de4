"""Ranks that average updates come and go: nothing is lost, and those that are left go on."""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gckernels
from gckernels import EFSignSGD, sync
from gckernels.sync import Attachment
from ranks import run_ranks, values_of
from workloads import digest_of, summed

SHAPE = (50, 40)


class Recorded(torch.optim.SGD):
    """Adds the mean of updates to the anchors, and keeps their sum over the ranks of all rounds.

    Attributes:
        members: the number of ranks that average now.
        received: the sum.
    """

    members = 0
    received = torch.zeros(SHAPE, dtype=torch.float64, device="cpu")

    def step(self, closure: Any = None) -> Any:
        Recorded.received -= self.members * self.param_groups[0]["params"][0].grad.double().cpu()
        return super().step(closure)


def linear(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(SHAPE[1], SHAPE[0], bias=False)


def on_all(model: nn.Module, group: dist.ProcessGroup | None = None) -> bool:
    """Whether all ranks of a group have the same parameters."""
    texts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(texts, digest_of(model.parameters()), group=group)
    return len(set(texts)) == 1


def regroup(attachment: Attachment, ranks: Sequence[int] | None) -> None:
    attachment.regroup(ranks)
    Recorded.members = 0 if ranks is None else len(ranks)


def stepped(model: nn.Linear, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> torch.Tensor:
    """The change of the parameters in a step, in fp64."""
    before = model.weight.detach().double()
    update = torch.randn(SHAPE, generator=generator, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        model.weight.add_(update.to(model.weight.device))
    given = model.weight.detach().double() - before
    optimizer.step()
    return given.cpu()


# -------------------------------------------------------------------- a rank is away for some rounds


def away(compressor: gckernels.Compressor, program: str | None, settings: dict[str, Any]) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model, everyone, others = linear(), range(world_size), range(world_size - 1)
    Recorded.members, Recorded.received = world_size, torch.zeros(SHAPE, dtype=torch.float64, device="cpu")
    optimizer, outer = torch.optim.SGD(model.parameters(), lr=0.0), functools.partial(Recorded, lr=1.0)
    plan = sync.uniform_plan(model, compressor, program=program)
    attachment = sync.attach(model, sync.Updates(optimizer, plan, every=2, outer=outer, decay=1.0, **settings))
    given = torch.zeros(SHAPE, dtype=torch.float64, device="cpu")
    generator = torch.Generator().manual_seed(rank)
    start = model.weight.detach().double().cpu().clone()
    for step in range(16):
        if step == 4:
            regroup(attachment, others if rank in others else None)
        if step == 10:
            assert settings or attachment.steps == (5 if rank in others else 2)
            regroup(attachment, everyone)
            assert attachment.stats()["world_size"] == world_size
        if step == 12:
            attachment.change_plan(sync.uniform_plan(model, "Identity"))  # sends what is left
        given += stepped(model, optimizer, generator)
        if step % 2 and not settings:
            assert on_all(model, attachment._frontend.group)
    if settings:  # a fragment on its way arrives
        attachment.regroup(everyone)
    anchor = attachment._frontend._anchors.values["weight"].detach().double().cpu()
    alone = model.weight.detach().double().cpu() - anchor  # steps behind the last fragment
    received = Recorded.received
    dist.broadcast(received, 0)  # rank 0 was never away
    torch.testing.assert_close(summed(given), received + summed(alone), rtol=0, atol=2e-4)
    assert not torch.equal(anchor, start)
    attachment.close()


CASES = [
    (EFSignSGD(), "allgather", {}),
    (gckernels.BlockQuant(bits=4), None, {}),
    (gckernels.PowerSGD(), None, {}),
    (EFSignSGD(), None, {"delay": 1}),
]


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (2, CASES[::2]),
        (4, CASES[1::2]),
        pytest.param(2, CASES[1::2], marks=pytest.mark.slow),
        pytest.param(4, CASES[::2], marks=pytest.mark.slow),
    ],
)
def test_nothing_is_lost_while_a_rank_is_away(world_size, cases):
    for case in cases:
        values_of(run_ranks(world_size, away, *case))


# -------------------------------------------------------------------- a rank is lost, another one joins


def trained(model: nn.Linear, optimizer: torch.optim.Optimizer, steps: range, rank: int) -> float:
    """The loss in the last step of a regression."""
    target = torch.randn(SHAPE, generator=torch.Generator().manual_seed(7), dtype=torch.float32, device="cpu")
    loss = torch.zeros((), dtype=torch.float32, device="cpu")
    for step in steps:
        inputs = torch.randn(16, SHAPE[1], generator=torch.Generator().manual_seed(1000 * rank + step))
        optimizer.zero_grad()
        loss = (model(inputs) - inputs @ target.T).square().mean()
        loss.backward()
        optimizer.step()
    return loss.item()


def lost_and_found(every: int) -> None:
    rank, alone, three = dist.get_rank(), dist.new_group([3]), dist.new_group([0, 1, 2])
    model = linear(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    group = alone if rank == 3 else three
    attachment = sync.attach(model, sync.Updates(optimizer, "BlockQuant(bits=4)", every=every), process_group=group)
    if rank < 3:
        trained(model, optimizer, range(4 * every - 1), rank)
    if rank == 2:
        os._exit(1)
    if rank < 2:
        before = model.weight.detach().clone()
        with pytest.raises(RuntimeError):
            trained(model, optimizer, range(4 * every - 1, 4 * every), rank)
        with pytest.raises(RuntimeError):
            trained(model, optimizer, range(4 * every, 5 * every), rank)
        moved = model.weight.detach() - before
        attachment.regroup([0, 1])
        assert bool(moved.any()) and not on_all(model, attachment._frontend.group)  # the failed round is still there
        trained(model, optimizer, range(5 * every, 9 * every), rank)
        assert on_all(model, attachment._frontend.group)
    attachment.regroup([0, 1, 3])
    assert on_all(model, attachment._frontend.group)
    trained(model, optimizer, range(9 * every, 60 * every), rank)
    loss = trained(model, optimizer, range(60 * every, 61 * every), rank)
    assert on_all(model, attachment._frontend.group) and loss < 1.0
    attachment.close()


@pytest.mark.host_only("collectives of a device do not raise where they are issued")
def test_ranks_go_on_without_a_lost_one_and_with_a_new_one():
    outcomes = run_ranks(4, lost_and_found, 2, fresh=True, exits=False, wait_for=(0, 1, 3), group_timeout_s=20.0)
    values_of([outcomes[rank] for rank in (0, 1, 3)])


def given_up() -> None:
    """Rank 1 finds that its link has failed, and sends nothing in the round in which rank 0 waits for it."""
    rank = dist.get_rank()
    model = linear(rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    attachment = sync.attach(model, sync.Updates(optimizer, "BlockQuant(bits=4)", every=1))
    trained(model, optimizer, range(2), rank)
    if rank == 0:
        with pytest.raises(RuntimeError):
            trained(model, optimizer, range(2, 3), rank)
    runtime = attachment._frontend.runtime
    groups = [link.groups for link in runtime._communicators._links.values()]  # kept, as by the traceback of an error
    if rank == 1:
        runtime._engine.lanes.failure.set(OSError("no route"))
    attachment.regroup([0, 1])
    trained(model, optimizer, range(3, 5), rank)
    assert groups
    assert on_all(model, attachment._frontend.group)
    attachment.close()


@pytest.mark.host_only("collectives of a device do not raise where they are issued")
def test_nobody_waits_for_a_rank_that_has_given_a_round_up():
    values_of(run_ranks(2, given_up, timeout_s=30.0, fresh=True, exits=False))


# -------------------------------------------------------------------- checkpoints, refusals


def resumed_while_away() -> None:
    rank, alone = dist.get_rank(), [dist.new_group([each]) for each in range(2)]
    runs = []
    for is_resumed in (False, True):
        model = linear()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
        attachment = sync.attach(model, sync.Updates(optimizer, "EFSignSGD", every=2))
        trained(model, optimizer, range(4), rank)
        attachment.regroup(None if rank else [0])
        trained(model, optimizer, range(4, 9), rank)
        if is_resumed:
            state = pickle.loads(pickle.dumps((attachment.state_dict(), optimizer.state_dict())))
            attachment.close()
            model = linear()
            optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
            attachment = sync.attach(model, sync.Updates(optimizer, "EFSignSGD", every=2), process_group=alone[rank])
            attachment.load_state_dict(state[0])
        trained(model, optimizer, range(9, 10), rank)
        attachment.regroup([0, 1])
        trained(model, optimizer, range(10, 14), rank)
        assert on_all(model)
        runs.append(digest_of(model.parameters()))
        attachment.close()
    assert runs[0] == runs[1]


def refusals() -> None:
    rank, model = dist.get_rank(), linear()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    attachment = sync.attach(model, sync.Updates(optimizer, "EFSignSGD", every=2))
    for ranks in ([1 - rank], [rank, 2]):
        with pytest.raises(ValueError, match=f"ranks must be None or ranks of the job, with this one, {rank}; got"):
            attachment.regroup(ranks)
    trained(model, optimizer, range(1 - rank), rank)
    with pytest.raises(RuntimeError, match="1 steps of a round of 2 have been made" if rank == 0 else "on rank 0: "):
        attachment.regroup([0, 1])
    trained(model, optimizer, range(1, 2) if rank == 0 else range(2), rank)
    attachment.regroup([rank])
    trained(model, optimizer, range(2, 4 + 2 * rank), rank)
    with pytest.raises(RuntimeError, match="rank 0 of the group has other parameters than rank 1 had"):
        attachment.regroup([0, 1])
    attachment.close()
    gradients = linear()
    averaged = sync.attach(gradients)  # finds its plan, and goes on with that
    following = averaged._listeners.functions
    with pytest.raises(RuntimeError, match="this one averages gradients"):
        averaged.regroup(None)
    assert averaged._listeners.functions == following != ()
    averaged.close()


def test_a_rank_that_is_away_can_be_resumed():
    values_of(run_ranks(2, resumed_while_away))


def test_groups_that_do_not_fit_are_refused():
    values_of(run_ranks(2, refusals))
