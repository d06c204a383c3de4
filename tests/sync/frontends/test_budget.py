"""The memory that a plan takes is the memory that it announced; it is taken once and stays within a budget."""

from __future__ import annotations

import collections
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gckernels
from gckernels import BlockQuant, EFSignSGD, sync
from gckernels.sync import attach
from gckernels.sync.frontends.budget import plan_nbytes, rank_nbytes, within_budget
from gckernels.sync.programs import ALLREDUCE, ALLTOALL, PROGRAMS, Place
from gckernels.sync.resources.memory_spaces import Places
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from workloads import combinations, digest_of, placed, topology


class Counted:
    """Counts the bytes that ``torch.zeros`` and its variants allocate for ``gckernels.sync``: buffers and residuals.

    Temporaries of compressors are not counted.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.nbytes = 0
        for owner, name in ((torch, "zeros"), (torch, "zeros_like"), (torch.Tensor, "new_zeros")):
            patch.setattr(owner, name, self._counting(getattr(owner, name)))

    def _counting(self, allocate):
        def counting(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if Path(gckernels.sync.__file__).parent in Path(sys._getframe(1).f_code.co_filename).parents:
                self.nbytes += tensor.nbytes
            return tensor

        return counting


def taken_on_host(pairs: list[tuple[str, str]]) -> list[tuple[int, int, int, int]]:
    """The same as ``taken`` with a separate host memory, where everything is encoded and decoded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Places, "of", lambda device: Places(device, torch.device("cpu"), apart=True))
        return taken(pairs, Place.HOST)


def taken(pairs: list[tuple[str, str]], place: Place = Place.DEVICE) -> list[tuple[int, int, int, int]]:
    """For every compressor and program: the bytes that the plan announced, in all and on the rank that needs most, that
    two steps took, and that two more took."""
    found = []
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for compressor, program in pairs:
        module = build("Mlp")
        where = topology(world_size)
        steps = placed(PROGRAMS[program], place)
        plan = sync.uniform_plan(
            module.named_parameters(),
            gckernels.from_spec(compressor),
            program=steps,
            topology=where,
            world_size=world_size,
        )
        attachment = attach(module, plan, bucket_cap_mb=SMALL_BUCKETS)
        apart = Places.of(torch.device("cpu")).apart
        dtypes = collections.defaultdict[str, torch.dtype](lambda: torch.float32)
        output = sum(plan_nbytes(plan, dtypes, where, apart)), rank_nbytes(plan, dtypes, where, apart)
        counts = []
        for first in (0, 2):
            with pytest.MonkeyPatch.context() as patch:
                counted = Counted(patch)
                for step in range(first, first + 2):
                    module(module.batch(step, rank)).backward()
            counts.append(counted.nbytes)
        attachment.close()
        found.append((*output, *counts))
    return found


# with 16, every sixteenth pair is tested, other ones with other numbers of ranks
FEW_AND_ALL = pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.slow)])


@FEW_AND_ALL
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_plan_takes_what_it_says_and_takes_it_once(world_size, every):
    pairs = combinations()[(world_size - 2) % every :: every]
    check_taken(pairs, values_of(run_ranks(world_size, taken, pairs)))


@FEW_AND_ALL
def test_what_steps_on_the_host_take(every):
    pairs = [pair for pair in combinations() if "PowerSGD" not in pair[0] and pair[1] != "powersgd"][::every]
    check_taken(pairs, values_of(run_ranks(3, taken_on_host, pairs)))


def check_taken(pairs: list[tuple[str, str]], outcomes: list[list[tuple[int, int, int, int]]]) -> None:
    for pair, *ranks in zip(pairs, *outcomes, strict=True):
        output, on_one_rank = ranks[0][:2]
        first, later = [taken for *_, taken, _ in ranks], [taken for *_, taken in ranks]
        # the plan announces the needs of the rank that needs most; roots and short last shards are spread over the
        # ranks
        assert max(first) <= on_one_rank <= output <= sum(first), pair
        assert later == [0] * len(ranks), f"{pair}: takes memory in later steps"


def test_within_a_budget():
    parameters = dict(build("Mlp").named_parameters())
    plan = sync.uniform_plan(parameters.items(), EFSignSGD(), program=ALLTOALL, world_size=4)
    dtypes = dict.fromkeys(parameters, torch.float32)
    needs = dict(zip(parameters, plan_nbytes(plan, dtypes, plan.topology_of(4)), strict=True))
    total, largest = sum(needs.values()), max(needs, key=needs.__getitem__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert within_budget("attach", plan, parameters, 4, total) == plan
        assert within_budget("attach", plan, parameters, 1, 0) == plan  # one rank needs no memory
    with pytest.warns(UserWarning, match=f"averaged without compression: {largest}$"):
        smaller = within_budget("attach", plan, parameters, 4, total - 1)
    assert {unit.key for unit in smaller.units if unit.program == ALLREDUCE} == {largest}
    smaller.check(parameters.items(), 4)
    with pytest.warns(UserWarning, match=r"more than the budget of 0\.0"):
        nothing = within_budget("attach", plan, parameters, 4, 0)
    assert {unit.program for unit in nothing.units} == {ALLREDUCE}


def with_a_budget(front: str) -> tuple[str, str, int]:
    """Digests of the gradients under a budget of zero and of plain DDP's gradients, and the bytes of the residuals."""
    module, plain = build("Mlp"), DistributedDataParallel(build("Mlp"), bucket_cap_mb=SMALL_BUCKETS)
    model: torch.nn.Module = module
    with pytest.warns(UserWarning, match="averaged without compression"):
        if front == "hook":
            model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
            attachment = attach(model, BlockQuant(), memory_budget_mb=0)
        else:
            attachment = attach(module, BlockQuant(), memory_budget_mb=0, bucket_cap_mb=SMALL_BUCKETS)
    for step in range(3):
        for each in (model, plain):
            each.zero_grad()
            each(module.batch(step, dist.get_rank())).backward()
    attachment.close()
    ours, expected = (digest_of(p.grad for p in each.parameters()) for each in (module, plain.module))
    return ours, expected, attachment.residual_nbytes()


@pytest.mark.parametrize("front", ["hook", "module"])
def test_without_memory_gradients_are_plain(front):
    for ours, plain, nbytes in values_of(run_ranks(2, with_a_budget, front)):
        assert ours == plain and nbytes == 0


def refused() -> list[str]:
    texts = []
    for budget in (-1, "much"):
        with pytest.raises(ValueError) as caught:
            attach(DistributedDataParallel(build("Mlp")), BlockQuant(), memory_budget_mb=budget)
        texts.append(str(caught.value))
    return texts


def test_a_budget_that_is_none():
    for texts in values_of(run_ranks(2, refused)):
        assert texts == [
            "attach: memory_budget_mb must be None or a number from 0 up, got -1",
            "attach: memory_budget_mb must be None or a number from 0 up, got 'much'",
        ]
