"""The life of an attachment: closed, built again, started late, several in one process."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_models import trained, wrapped
from gckernels import BlockQuant, Cast16, EFSignSGD, Identity, sync
from gckernels.sync import attach
from gckernels.sync.programs import ALLGATHER, ALLTOALL, ENCODED_ALLREDUCE
from leftovers import lanes, silent
from models import build
from ranks import run_ranks, values_of
from workloads import digest_of

# -------------------------------------------------------------------- closing and building again


def built_again() -> list[str]:
    digests = []
    before = threading.active_count()
    for program in (ALLGATHER, ALLTOALL, ALLTOALL):
        model = wrapped()
        attachment = attach(model, sync.uniform_plan(model, BlockQuant(), program=program))
        digests.append(trained(model, range(5)))
        # at most one thread for each lane: there is one compute lane more than communication lanes
        assert 0 < len(lanes()) <= (3 if program == ALLGATHER else 5)
        attachment.close()
        attachment.close()  # a second close does nothing
        assert not lanes() and threading.active_count() == before
        sum_of_ranks = torch.ones(3)
        dist.all_reduce(sum_of_ranks)
        assert sum_of_ranks.tolist() == [dist.get_world_size()] * 3
    assert digests[1] == digests[2] != digests[0]  # no state of the first attachment is left
    return digests


@pytest.mark.host_only("lanes of a device are no threads")
@pytest.mark.parametrize("world_size", [2, 3])
def test_close_and_build_again(world_size):
    found = values_of(run_ranks(world_size, built_again))
    assert all(digests == found[0] for digests in found)


def closed_before_any_step() -> None:
    attachment = attach(wrapped(), BlockQuant())
    assert attachment.sent_nbytes_per_step() == 0.0 and attachment.residual_nbytes() == 0
    attachment.close()
    assert not lanes()


def test_close_before_any_step():
    values_of(run_ranks(2, closed_before_any_step))


def closed_at_once() -> None:
    """No rank closes connections that another one is still opening."""
    module = build("Mlp")
    for _ in range(8):
        attach(module, Identity()).close()


def test_close_at_once():
    values_of(run_ranks(3, closed_at_once))


def after_the_group(folder: Path) -> list[str]:
    """Close an attachment, or drop its model, after all process groups are destroyed, while a second one keeps training
    on new groups; return the digests."""
    digests = []
    for by_hook, closes in itertools.product((True, False), (True, False)):
        first, second = (build("Mlp") for _ in range(2))
        model = DistributedDataParallel(first) if by_hook else first
        front = attach(model, BlockQuant())
        _backward(model, first, range(3))
        store = dist.FileStore(str(folder / f"{by_hook}-{closes}"), 2)
        rank, gone = dist.get_rank(), weakref.ref(front)
        with silent():
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
            again = attach(second, BlockQuant())
            digests.append(_backward(second, second, range(3)))
            if closes:
                front.close()
                front.close()
                assert front.state_dict()["step"] == 3
            del model, first, front
            gc.collect()
            assert gone() is None
            digests.append(_backward(second, second, range(3, 6)))
            again.close()
        assert not lanes()
    return digests


def _backward(model: torch.nn.Module, module: torch.nn.Module, steps: range) -> str:
    for step in steps:
        model(module.batch(step, dist.get_rank())).backward()
    return digest_of(parameter.grad for parameter in module.parameters())


@pytest.mark.host_only("it makes groups of Gloo")
def test_what_outlives_the_process_groups(tmp_path):
    first, second = values_of(run_ranks(2, after_the_group, tmp_path))
    assert first == second
    assert len(set(first)) == 2  # one digest for the first three steps, another for the next


def without_a_handle(folder: Path) -> list[str]:
    """Synchronise a model again on new process groups, when nobody can close what it has kept of the destroyed ones."""
    digests, module = [], build("Mlp")
    attach(module, BlockQuant())
    for life in range(2):
        store, rank = dist.FileStore(str(folder / str(life)), 2), dist.get_rank()
        with silent():
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
            last = attach(module, BlockQuant())
            with pytest.raises(ValueError, match=r"close\(\) that first"):
                attach(module, BlockQuant())
            module.zero_grad()
            digests.append(_backward(module, module, range(3)))
    last.close()
    assert digests[0] == digests[1]
    return digests


@pytest.mark.host_only("it makes groups of Gloo")
def test_a_handle_that_was_lost_with_its_process_group(tmp_path):
    first, second = values_of(run_ranks(2, without_a_handle, tmp_path))
    assert first == second


def trained_after_the_group() -> list[str]:
    """Process groups that somebody still holds keep working after ``destroy_process_group``: ours do, as DDP's do."""
    digests = []
    models = [wrapped(), wrapped(), build("Mlp")]
    ways = [attach(models[0], Identity()), attach(models[2], Identity())]
    with silent():
        rank = dist.get_rank()
        dist.destroy_process_group()
        for model, module in zip(models, (models[0].module, models[1].module, models[2]), strict=True):
            for step in range(3):
                model(module.batch(step, rank)).backward()
            digests.append(digest_of(parameter.grad for parameter in module.parameters()))
        for front in ways:
            front.close()
    assert not lanes()
    return digests


@pytest.mark.host_only("lanes of a device are no threads")
def test_training_goes_on_without_the_default_group():
    found = values_of(run_ranks(2, trained_after_the_group))
    assert {digest for digests in found for digest in digests} == {found[0][0]}


def dropped() -> None:
    model = wrapped()
    attachment = attach(model, BlockQuant())
    trained(model, range(3))
    assert lanes()
    del model, attachment
    gc.collect()
    assert not lanes()


@pytest.mark.host_only("lanes of a device are no threads")
def test_the_threads_of_a_model_that_is_gone_end():
    values_of(run_ranks(2, dropped))


def left_open() -> str:
    model = wrapped()
    model.kept = attach(model, sync.uniform_plan(model, BlockQuant(), program=ALLTOALL))
    _KEPT.append(model)
    return trained(model, range(3))


_KEPT: list[Any] = []


@pytest.mark.host_only("lanes of a device are no threads")
def test_a_program_that_never_closes_ends_all_the_same():
    outcomes = run_ranks(2, left_open, fresh=True, timeout_s=60)
    # run_ranks reports the threads, which still exist when the function returns; they end with the process
    for outcome in outcomes:
        assert (outcome.error_type, outcome.exit_code) == ("ThreadsLeft", 0), outcome.output


# -------------------------------------------------------------------- late starts, two attachments


def started_late() -> None:
    """Training is compressed from the fourth step on; before, the gradients have the bits of plain DDP."""
    plain, model, resumed = wrapped(), wrapped(), wrapped()
    attachment = attach(model, EFSignSGD(), start_step=3)
    assert trained(model, range(3)) == trained(plain, range(3))
    assert attachment.residual_nbytes() == 0 and attachment.sent_nbytes_per_step() == 0
    state = attachment.state_dict()
    again = attach(resumed, EFSignSGD(), start_step=3)
    again.load_state_dict(state)
    resumed.module.load_state_dict(model.module.state_dict())
    compressed = trained(model, range(3, 5))
    assert compressed != trained(plain, range(3, 5))
    assert attachment.residual_nbytes() > 0 and attachment.sent_nbytes_per_step() > 0
    assert trained(resumed, range(3, 5)) == compressed  # it counts the job's steps, not this process's
    attachment.close()
    again.close()


def test_compression_that_starts_late():
    values_of(run_ranks(2, started_late))


def late(steps: int, settings: dict[str, bool]) -> None:
    """An attachment that is made after ``steps`` steps of plain DDP compresses its first step, unless DDP has its first
    buckets then. A static graph has them in two steps."""
    settled = 0 if "find_unused_parameters" in settings else 2 if "static_graph" in settings else 1
    model, plain = wrapped(**settings), wrapped(**settings)
    assert trained(model, range(steps)) == trained(plain, range(steps))
    attachment = attach(model, BlockQuant())
    for step in range(steps, steps + 2):
        will_be_rebuilt = step == steps < settled
        is_exact = trained(model, range(step, step + 1)) == trained(plain, range(step, step + 1))
        assert is_exact == (attachment.residual_nbytes() == 0) == will_be_rebuilt
    attachment.close()


@pytest.mark.parametrize("setting", [None, "static_graph", "find_unused_parameters"])
def test_attached_in_the_middle_of_training(setting):
    for steps in (0, 1, 3):
        values_of(run_ranks(2, late, steps, {} if setting is None else {setting: True}))


def two_models() -> list[str]:
    """Two attachments that train in alternation give the same results as one after the other."""
    settings = ((1, BlockQuant(), ALLTOALL), (2, Cast16(), ENCODED_ALLREDUCE))
    apart = []
    for seed, compressor, program in settings:
        model = wrapped(seed)
        attachment = attach(model, sync.uniform_plan(model, compressor, program=program))
        trained(model, range(6))
        apart.append(digest_of(model.parameters()))
        attachment.close()
    models = [wrapped(seed) for seed, _, _ in settings]
    attachments = [
        attach(model, sync.uniform_plan(model, compressor, program=program))
        for model, (_, compressor, program) in zip(models, settings, strict=True)
    ]
    for step in range(6):
        for model in models:
            trained(model, range(step, step + 1))
    assert [digest_of(model.parameters()) for model in models] == apart
    for attachment in attachments:
        attachment.close()
    return apart


def test_two_attachments_in_one_process():
    found = values_of(run_ranks(2, two_models))
    assert found[0] == found[1]
