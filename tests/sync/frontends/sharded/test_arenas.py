"""Messages of the groups of a model of FSDP2 use the same memory: it does not grow with their number, and nothing that
lies in it from other messages changes a training."""

from __future__ import annotations

import gc
import time
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from gckernels import sync
from gckernels.sync.engine.runtime import Runtime
from gckernels.sync.programs import PROGRAMS, Place, ring
from gckernels.sync.resources.memory_spaces import BufferArena, Places
from ranks import run_ranks, values_of
from sharded_models import SETTINGS, adamw, digest, model_of, split, train


def kept_nbytes() -> int:
    """The bytes of buffers that stay: Gloo holds the tensors of a collective for a moment after its end."""
    found = []
    for _ in range(10):
        time.sleep(0.02)
        found.append(buffers_nbytes())
    return min(found)


def buffers_nbytes() -> int:
    """The bytes of all memory of buffers, which is ``uint8``."""
    gc.collect()
    storages = (each.untyped_storage() for each in gc.get_objects() if type(each) is torch.Tensor and is_buffer(each))
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


CPU = torch.device("cpu")


def is_buffer(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.device.type == torch.get_default_device().type
        and tensor.dtype == torch.uint8
    )


def growth(form: str, groups: int) -> int:
    """The bytes of buffers that the steps of an attached model of some groups leave behind, whose last one is wider."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(*(nn.Linear(40, 40) for _ in range(groups - 1)), nn.Linear(40, 90))
    split(model, (*model, model), form)
    before, attachment = kept_nbytes(), sync.attach(model, "BlockQuant(bits=4)")
    for _ in range(3):
        model(torch.ones(2, 40)).sum().backward()
    found = kept_nbytes() - before
    attachment.close()
    return found


def growths(form: str) -> list[int]:
    return [growth(form, groups) for groups in (3, 8)]


@pytest.mark.parametrize(
    ("form", "ranks"), [("hsdp", 4), pytest.param("one shard", 3, marks=pytest.mark.slow), ("fsdp", 2)]
)
def test_buffers_do_not_grow_with_the_number_of_groups(form, ranks):
    for few, many in values_of(run_ranks(ranks, growths, form)):
        assert 0 < few == many


WAYS = (
    ("BlockQuant(bits=4)", "alltoall"),
    ("TopK(ratio=0.1)", "parameter_server"),
    ("Cast16", "encoded_allreduce"),
    ("PowerSGD", "powersgd"),
    ("EFSignSGD", "hierarchical"),
    ("QSGD", "ring"),
)


def trained(spec: str, program: str, fill: int | None) -> str:
    """The digest of a training whose messages have their own memory, or an arena that is filled after each step."""
    model = model_of(SETTINGS["plain"], "replicate")
    steps, topology = (
        PROGRAMS[program] if program in PROGRAMS else ring(4),
        (2, 2) if program == "hierarchical" else None,
    )
    plan = sync.uniform_plan(model, spec, program=steps, topology=topology)
    arenas: list[BufferArena] = []

    def arena(runtime: Runtime, number: int) -> BufferArena | None:
        arenas.append(known(runtime, number))
        return None if fill is None else arenas[-1]

    known = Runtime.arena
    with mock.patch.object(Runtime, "arena", arena):
        attachment = sync.attach(model, plan)
        attachment.on_step_end(lambda: [block.fill_(fill or 0) for each in arenas for block in each._blocks.values()])
        train(model, SETTINGS["plain"], range(3), adamw(model))
    assert any(each.nbytes for each in arenas) == (fill is not None)
    attachment.close()
    return digest(model)


def all_trained() -> dict[tuple[str, str], set[str]]:
    return {each: {trained(*each, fill) for fill in (None, 255)} for each in WAYS}


def test_nothing_in_shared_memory_changes_a_training():
    for found in values_of(run_ranks(4, all_trained)):
        assert all(len(digests) == 1 for digests in found.values()), found


def test_an_arena_is_as_large_as_the_largest_bucket():
    arena = BufferArena(Places.of(CPU))

    def made(*sizes: int) -> list[torch.Tensor]:
        return arena.build(lambda: [arena.take((size,), torch.float32, Place.DEVICE) for size in sizes])

    first, second = made(100, 30)
    assert arena.version == 1 and arena.nbytes == 512 + 256
    assert first.data_ptr() + 512 == second.data_ptr() and not first.data_ptr() % 4
    third, _ = made(90, 60)
    assert arena.version == 1 and third.data_ptr() == first.data_ptr() and third.numel() == 90
    (fourth,) = made(200)
    assert arena.version == 2 and arena.nbytes == 1024 and fourth.data_ptr() != first.data_ptr()
    made(1, 1)
    assert arena.version == 2
