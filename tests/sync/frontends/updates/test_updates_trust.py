"""States of other ranks are read as JSON and tensors, and damage raises the same error on all ranks."""

from __future__ import annotations

import functools
import json
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gckernels import sync
from gckernels.sync.communication import agreement, collectives
from gckernels.sync.frontends.updates import lineage, sent_states, updates_frontend
from ranks import run_ranks, values_of
from workloads import digest_of

NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
CPU = torch.device("cpu")


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 12)).square().mean().backward()
        optimizer.step()


def regrouped() -> None:
    """Nothing is unpickled; damage of one rank is an error that all raise, before anything has changed."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(rank)
    model = nn.Linear(12, 12)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    attachment = sync.attach(model, sync.Updates(optimizer, "EFSignSGD", every=2, outer=NESTEROV, scale_steps=True))
    trained(model, optimizer, 4)
    everyone = range(world_size)

    def refused(target: Any, name: str, changed: Any, text: str) -> None:
        before = digest_of(model.parameters())
        lie = mock.patch.object(target, name, changed if rank == 0 else getattr(target, name))
        with lie, pytest.raises((RuntimeError, ValueError), match=text):
            attachment.regroup(everyone)
        assert digest_of(model.parameters()) == before

    dumps = json.dumps
    for text in ("{", "[]", '{"arrived": 3}', "9" * 5000):
        refused(lineage.json, "dumps", lambda *_, text=text: text, "rank 0 of the group has sent no standing")
    damaged = lambda state: dumps(state | {"arrived": "3"} if "arrived" in state else state)
    refused(lineage.json, "dumps", damaged, "damaged standing")
    long = lambda group, device, source, text: collectives.broadcast_text(group, device, source, text + "}")
    refused(updates_frontend, "broadcast_text", long, "newest parameters has sent is damaged")
    with (
        mock.patch.object(pickle, "loads", side_effect=AssertionError),
        mock.patch.object(dist, "broadcast_object_list", side_effect=AssertionError),
    ):
        attachment.regroup(everyone)
    trained(model, optimizer, 4)
    texts: list[Any] = [None] * world_size
    dist.all_gather_object(texts, (digest_of(model.parameters()), digest_of(_momenta(attachment))))
    assert len(set(texts)) == 1
    attachment.close()


def _momenta(attachment: sync.Attachment) -> list[torch.Tensor]:
    state = attachment.state_dict()["updates"]["outer"]["state"]
    return [each["momentum_buffer"] for each in state.values()]


def _exchanged(lie: str | None, group: Any, device: Any, text: str) -> list[str]:
    return collectives.exchange_text(group, device, text if lie is None else lie)


def agreements() -> None:
    """Lengths of other ranks are limited."""
    rank, group = dist.get_rank(), dist.group.WORLD
    for report, text in (
        ("settings: 0 400000000000 x", "rank 0 says that it has 400000000000 settings, and 1,048,576 are most"),
        ("settings: 0 0 x", "rank 0 says that it has 0 settings"),
        ("settings: 0 -1 x", "rank 0 has sent no settings"),
        ("nonsense", "rank 0 has sent no settings, but 'nonsense'"),
    ):
        lie = functools.partial(_exchanged, report if rank == 0 else None)
        with mock.patch.object(agreement, "exchange_text", lie), pytest.raises(RuntimeError, match=text):
            agreement.agreed("try", group, CPU, lambda: (True, ["x"]))
    limit = mock.patch.object(collectives, "_LONGEST_NBYTES", 10)
    with limit, pytest.raises(RuntimeError, match="rank 1 says that it sends a text of 11 bytes"):
        collectives.broadcast_text(group, CPU, 1, "x" * (10 + rank))
    for text in ("", "ß" * 5000):
        assert collectives.broadcast_text(group, CPU, 1, text if rank == 1 else "other") == text


def kinds() -> None:
    agreements()
    regrouped()


def test_nothing_is_trusted():
    values_of(run_ranks(2, kinds))


def test_states_as_text():
    state = {
        "state": {0: {"m": torch.arange(6.0).view(2, 3), "s": torch.tensor(3)}},
        "list": [(1, None), True, "x", 0.5],
    }
    text, tensors = sent_states.written("outer", state)
    found, empty = sent_states.read("outer", text, 0)
    for one, other in zip(empty, tensors, strict=True):
        one.copy_(other)
    assert sent_states.written("outer", found)[0] == text and found["list"] == state["list"]
    assert all(torch.equal(one, other) for one, other in zip(empty, tensors, strict=True))
    with pytest.raises(TypeError, match="must have tensors, texts and numbers to be sent, got object"):
        sent_states.written("outer", {"x": object()})
    for wrong in (
        '{"tensor": ["float32", 400000000000]}',
        '{"tensor": ["nn", 4]}',
        '{"tensor": ["float32", -1]}',
        '{"dict": [[{"list": []}, 1]]}',
        '{"dict": 3}',
        "{",
        "[1]",
        "[" * 100_000,
    ):
        with pytest.raises(ValueError, match=r"^outer: "):
            sent_states.read("outer", wrong, 0)
