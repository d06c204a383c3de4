"""The number of a step, which is added to all seeds, lies in memory and is right, however the step is reached."""

from __future__ import annotations

import pytest
import torch

from gckernels.codec import SEED_MASK
from gckernels.sync.messages.seeds import Seeds, step_seed, unit_seed
from gckernels.sync.programs.steps import Place
from gckernels.sync.resources.memory_spaces import Places

CPU = torch.device("cpu")


@pytest.mark.parametrize("places", [Places.of(CPU), Places(CPU, CPU, apart=True)], ids=["one memory", "two"])
def test_the_number_of_a_step_follows_from_the_step_alone(places):
    seeds = Seeds(5, places)
    memory = [seeds.added(place) for place in Place]
    assert len({each.data_ptr() for each in memory}) == 1 + places.apart
    for step in (0, 1, 2, 3, 3, 1000, 1001, 2**40, 4):
        seeds.begin(step)
        seed = seeds.of("unit", 3)
        assert seed == unit_seed(5, "unit", 3)
        for place, before in zip(Place, memory, strict=True):
            assert seeds.added(place) is before
            assert (seed + int(before)) & SEED_MASK == step_seed(seed, step)


def test_a_step_that_follows_is_reached_by_addition():
    """A CUDA graph of it goes on by one step in every replay."""
    seeds = Seeds(0, Places.of(CPU))
    seeds.begin(7)
    seeds.added().copy_(torch.tensor([step_seed(0, 20)]))  # as replays would leave it
    seeds.begin(8)
    assert int(seeds.added()) & SEED_MASK == step_seed(0, 21)


@pytest.mark.parametrize("step", [0, 1, 7, 2**40])
def test_steps_of_replays_are_found_in_memory(step):
    seeds = Seeds(0, Places.of(CPU))
    seeds.begin(step)
    assert seeds.replayed() == 0
    before = seeds.added().clone()
    for count in (1, 2, 3):  # as replays of the following step leave it
        seeds.begin(step + count)
        seeds.step = step
        assert seeds.replayed() == count
    seeds.added().copy_(before)
    seeds.step = step + 1  # a step has been captured, and not yet replayed
    assert seeds.replayed() == -1
