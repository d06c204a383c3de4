"""Checkpoints have the step that replayed CUDA graphs have reached."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from gckernels import QSGD
from gckernels.sync import attach
from ranks import run_ranks, values_of

REPLAYS = 5


def train(module: torch.nn.Module, steps: int) -> None:
    for _ in range(steps):
        module(torch.ones(2, 40)).square().mean().backward()


def steps_of_states() -> list[int]:
    """The steps in states before replays, after them, and after one more step of the host."""
    torch.manual_seed(0)
    module = DistributedDataParallel(torch.nn.Linear(40, 30))
    attachment = attach(module, QSGD())
    train(module, 3)
    found = [attachment.state_dict()["step"]]
    seeds = attachment._frontend.runtime._seeds
    known = seeds.step
    for count in range(1, REPLAYS + 1):  # as replays leave the memory of the device
        seeds.begin(known + count)
    seeds.step = known
    found.append(attachment.state_dict()["step"])
    train(module, 1)
    found.append(attachment.state_dict()["step"])
    return found


def test_replays_count_as_steps():
    for found in values_of(run_ranks(2, steps_of_states)):
        assert found == [3, 3 + REPLAYS, 4 + REPLAYS]
