"""A state in memory stays as it is, whatever a training does that has given it or goes on from it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gckernels import sync
from models import build
from ranks import run_ranks, values_of
from workloads import digest_of

NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def tensors(state: Any) -> Iterator[torch.Tensor]:
    """All tensors of a state."""
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, Mapping | list | tuple):
        for each in state.values() if isinstance(state, Mapping) else state:
            yield from tensors(each)


class Training:
    """A training of a kind."""

    def __init__(self, kind: str, settings: dict[str, Any]) -> None:
        self.model: nn.Module = build("Mlp")
        wrapped = DistributedDataParallel(self.model) if "DDP" in kind else self.model
        self.loss: Any = self.model.batch
        self.call = wrapped
        adam = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2) if "directions" in kind else adam
        self.others: list[Any] = []
        if "directions" in kind:
            self.others = [sync.AdamDirection(self.model, self.optimizer)]
        if "updates" in kind:
            self.handle = sync.attach(wrapped, sync.Updates(self.optimizer, "EFSignSGD", **settings), seed=3)
        else:
            self.handle = sync.attach(wrapped, "EFSignSGD", **settings)

    def train(self, first: int, steps: int) -> str:
        for step in range(first, first + steps):
            self.optimizer.zero_grad()
            self.call(self.loss(step, dist.get_rank())).backward()
            self.optimizer.step()
        return digest_of(self.model.parameters())

    def state(self) -> list[Any]:
        return [each.state_dict() for each in (self.handle, *self.others)]

    def load(self, states: list[Any]) -> None:
        for each, state in zip((self.handle, *self.others), states, strict=True):
            each.load_state_dict(state)


KINDS: list[tuple[str, dict[str, Any]]] = [
    ("bare", {}),
    ("DDP", {"can_discard": True}),
    ("DDP, directions", {}),
    ("updates", {"every": 2, "outer": NESTEROV}),
    ("updates", {"every": 2, "delay": 1}),
    ("updates", {"every": 4, "delay": 2, "fragments": 2, "outer": NESTEROV}),
    ("updates", {"every": 3, "delay": 2, "mixing": 0.5}),
]


def kept() -> None:
    for kind, settings in KINDS:
        training = Training(kind, settings)
        training.train(0, 6)
        for saved_at in (6, 7):
            states, parameters = training.state(), copy.deepcopy(training.model.state_dict())
            optimizer = copy.deepcopy(training.optimizer.state_dict())
            before = digest_of(tensors(states))
            found = []
            for _ in range(3):
                found.append(training.train(saved_at, 4))
                assert digest_of(tensors(states)) == before, (kind, settings)
                training.load(states)
                if "updates" not in kind:
                    training.model.load_state_dict(parameters)
                    training.optimizer.load_state_dict(copy.deepcopy(optimizer))
            assert len(set(found)) == 1, (kind, settings, saved_at, found)
            training.train(saved_at, 1)
        training.handle.close()


def test_states_stay_as_they_are():
    """Three times from the same state, with steps of which messages are on their way when it is loaded again."""
    values_of(run_ranks(2, kept))


def early() -> None:
    """The messages of units that have been compressed since the state was taken are still there when it is loaded."""
    for kind, settings in (("bare", {}), ("DDP", {}), ("updates", {})):
        training = Training(kind, settings)
        states = training.state()
        training.train(0, 3)
        for steps in (0, 2):
            training.load(states)
            training.train(0, steps)
            training.load(training.state())
        training.handle.close()


def test_states_from_before_anything_was_compressed():
    values_of(run_ranks(2, early))


def replaced() -> None:
    """Whatever replaces the state or the plan ends what is on its way first."""
    for settings in ({"every": 2, "delay": 2}, {"every": 4, "delay": 2, "fragments": 2, "outer": NESTEROV}):
        for plan in ("Identity", "EFSignSGD"):
            digests = []
            for waits in (True, False):
                training = Training("updates", settings)
                for step in range(0, 16, 4):
                    training.train(step, 4)
                    if waits and training.handle._frontend._arriving is not None:
                        training.handle._frontend._arriving.wait()
                    made = sync.uniform_plan(training.model, plan if step % 8 else "BlockQuant(bits=4)")
                    training.handle.change_plan(made)
                digests.append(training.train(16, 4))
                training.handle.regroup([0, 1])
                training.train(20, 2)
                training.handle.close()
                training.optimizer.step()
            assert len(set(digests)) == 1, (settings, plan)


@pytest.mark.slow
def test_changes_end_what_is_on_its_way():
    values_of(run_ranks(2, replaced))
