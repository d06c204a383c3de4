"""A closed attachment leaves no threads, without a collection of garbage."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist

from ddp_models import attached
from gckernels import BlockQuant, sync
from leftovers import group_threads, lanes
from models import build
from ranks import run_ranks, values_of
from sharded_models import split


def threads_of(front: str) -> list[int]:
    """The threads of process groups before an attachment, with it, after a change of its plan, and after its end."""
    gc.collect()
    gc.disable()
    try:
        return _threads_of(front)
    finally:
        gc.enable()


def _threads_of(front: str) -> list[int]:
    module, found = build("Mlp"), [group_threads()]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    match front:
        case "fsdp":
            split(module, (module,), "fsdp")
            model, taken = module, sync.attach(module, BlockQuant())
        case "updates":
            model, taken = module, sync.attach(module, sync.Updates(optimizer, BlockQuant(), every=2))
        case _:
            model, taken = attached(front, module, BlockQuant())

    def train() -> None:
        for step in range(4):
            model(module.batch(step, dist.get_rank())).backward()
            if front == "updates":
                optimizer.step()
        found.append(group_threads())

    train()
    taken.change_plan(sync.uniform_plan(model, BlockQuant(bits=4), world_size=dist.get_world_size()))
    train()
    taken.close()
    assert not lanes()
    return [*found, group_threads()]


def test_threads_end_with_the_attachment_or_the_plan():
    for front in ("hook", "module", "fsdp", "updates"):
        for before, first, second, after in values_of(run_ranks(2, threads_of, front)):
            assert first == second > before == after, front
