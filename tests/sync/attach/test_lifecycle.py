"""The life of an attachment: on one rank, started late, closed, built again, on a subgroup, several in one process."""

from __future__ import annotations

import copy
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

from gckernels import BlockQuant, Cast16, Compressor, EFSignSGD, Identity, RandomK, sync
from gckernels.compressor import SEED_MASK
from gckernels.sync import ALLGATHER, ALLREDUCE, ALLTOALL, ENCODED_ALLREDUCE, Synchronizer, attach
from gckernels.sync.messages import codings
from gckernels.sync.resources.feedback import KINDS
from leftovers import silent
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from workloads import digest_of


def _wrapped(seed: int = 0, group: dist.ProcessGroup | None = None, **settings: bool) -> DistributedDataParallel:
    module = build("Mlp", seed=seed)
    return DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS, process_group=group, **settings)


def _trained(model: DistributedDataParallel, steps: range) -> str:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    digests = []
    for step in steps:
        optimizer.zero_grad()
        model(model.module.batch(step, dist.get_rank())).backward()
        digests.append(digest_of(parameter.grad for parameter in model.parameters()))
        optimizer.step()
    return digest_of(model.parameters()) + "".join(digests)


def _lanes() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("gckernels"))


# -------------------------------------------------------------------- one rank


def alone() -> None:
    expected = _trained(_wrapped(), range(6))
    for program in (None, ALLREDUCE, ALLGATHER, ALLTOALL):
        model = _wrapped()
        attachment = attach(model, sync.plan(model, EFSignSGD(), program=program))
        assert _trained(model, range(6)) == expected
        assert attachment.sent_nbytes_per_step() == 0.0 and attachment.residual_nbytes() == 0
        state = attachment.state_dict()
        steps = 0 if program == ALLREDUCE else 6  # a plan that compresses nothing leaves them to DDP
        expected_state = {"step": steps, "rank": 0, "world_size": 1, "plan": attachment.plan.to_json(), "units": []}
        assert expected_state.items() <= state.items() and state["feedback"] == {kind: {} for kind in KINDS}
        attachment.load_state_dict(state)
        attachment.close()
        assert not _lanes()


def test_one_rank_is_as_without_a_hook():
    values_of(run_ranks(1, alone))


# -------------------------------------------------------------------- closing and building again


def built_again() -> list[str]:
    digests = []
    before = threading.active_count()
    for program in (ALLGATHER, ALLTOALL, ALLTOALL):
        model = _wrapped()
        attachment = attach(model, sync.plan(model, BlockQuant(), program=program))
        digests.append(_trained(model, range(5)))
        # at most one thread for each lane: there is one compute lane more than communication lanes
        assert 0 < len(_lanes()) <= (3 if program == ALLGATHER else 5)
        attachment.close()
        attachment.close()  # a second close does nothing
        assert not _lanes() and threading.active_count() == before
        sum_of_ranks = torch.ones(3)
        dist.all_reduce(sum_of_ranks)
        assert sum_of_ranks.tolist() == [dist.get_world_size()] * 3
    assert digests[1] == digests[2] != digests[0]  # no state of the first attachment is left
    return digests


@pytest.mark.parametrize("world_size", [2, 3])
def test_close_and_build_again(world_size):
    found = values_of(run_ranks(world_size, built_again))
    assert all(digests == found[0] for digests in found)


def closed_before_any_step() -> None:
    attachment = attach(_wrapped(), BlockQuant())
    assert attachment.sent_nbytes_per_step() == 0.0 and attachment.residual_nbytes() == 0
    attachment.close()
    assert not _lanes()


def test_close_before_any_step():
    values_of(run_ranks(2, closed_before_any_step))


def closed_at_once() -> None:
    """No rank closes connections that another one is still opening."""
    module = build("Mlp")
    for _ in range(15):
        Synchronizer(module, Identity()).close()


def test_close_at_once():
    values_of(run_ranks(3, closed_at_once))


def after_the_group(folder: Path) -> list[str]:
    """Close an attachment, or drop its model, after all process groups are destroyed, while a second one keeps training
    on new groups; return the digests."""
    digests = []
    for by_hook, closes in itertools.product((True, False), (True, False)):
        first, second = (build("Mlp") for _ in range(2))
        model = DistributedDataParallel(first) if by_hook else first
        front = attach(model, BlockQuant()) if by_hook else Synchronizer(model, BlockQuant())
        _backward(model, first, range(3))
        store = dist.FileStore(str(folder / f"{by_hook}-{closes}"), 2)
        rank, gone = dist.get_rank(), weakref.ref(front)
        with silent():
            dist.destroy_process_group()
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
            again = Synchronizer(second, BlockQuant())
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
        assert not _lanes()
    return digests


def _backward(model: torch.nn.Module, module: torch.nn.Module, steps: range) -> str:
    for step in steps:
        model(module.batch(step, dist.get_rank())).backward()
    return digest_of(parameter.grad for parameter in module.parameters())


def test_what_outlives_the_process_groups(tmp_path):
    first, second = values_of(run_ranks(2, after_the_group, tmp_path))
    assert first == second
    assert len(set(first)) == 2  # one digest for the first three steps, another for the next


def trained_after_the_group() -> list[str]:
    """Process groups that somebody still holds keep working after ``destroy_process_group``: ours do, as DDP's do."""
    digests = []
    models = [_wrapped(), _wrapped(), build("Mlp")]
    ways = [attach(models[0], Identity()), Synchronizer(models[2], Identity())]
    with silent():
        rank = dist.get_rank()
        dist.destroy_process_group()
        for model, module in zip(models, (models[0].module, models[1].module, models[2]), strict=True):
            for step in range(3):
                model(module.batch(step, rank)).backward()
            digests.append(digest_of(parameter.grad for parameter in module.parameters()))
        for front in ways:
            front.close()
    assert not _lanes()
    return digests


def test_training_goes_on_without_the_default_group():
    found = values_of(run_ranks(2, trained_after_the_group))
    assert {digest for digests in found for digest in digests} == {found[0][0]}


def dropped() -> None:
    model = _wrapped()
    attachment = attach(model, BlockQuant())
    _trained(model, range(3))
    assert _lanes()
    del model, attachment
    gc.collect()
    assert not _lanes()


def test_the_threads_of_a_model_that_is_gone_end():
    values_of(run_ranks(2, dropped))


def left_open() -> str:
    model = _wrapped()
    model.kept = attach(model, sync.plan(model, BlockQuant(), program=ALLTOALL))
    _KEPT.append(model)
    return _trained(model, range(3))


_KEPT: list[Any] = []


def test_a_program_that_never_closes_ends_all_the_same():
    outcomes = run_ranks(2, left_open, fresh=True, timeout_s=60)
    # run_ranks reports the threads, which still exist when the function returns; they end with the process
    assert [(outcome.error_type, outcome.exit_code) for outcome in outcomes] == [("ThreadsLeft", 0)] * 2


# -------------------------------------------------------------------- seeds


def seeds(seed: int, first_step: int) -> list[int]:
    """The seeds that this rank encodes with in the first six steps, for payloads that cannot be summed."""
    return _seeds(BlockQuant(), seed, first_step, summable=False)


def _seeds(compressor: Compressor, seed: int, first_step: int, summable: bool) -> list[int]:
    seen: list[int] = []

    def noting(bind):
        def bound(units, scale, added):
            work = bind(units, scale, added)
            bases = [unit.seed for unit in units if unit.compressor.traits.summable == summable]

            def work_and_note() -> None:
                seen.extend((base + int(added)) & SEED_MASK for base in bases)
                work()

            return work_and_note

        return bound

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codings, "bind_encodes", noting(codings.bind_encodes))
        patch.setattr(codings, "bind_recodes", noting(codings.bind_recodes))
        model = _wrapped()
        attachment = attach(model, sync.plan(model, compressor, program=ALLTOALL), seed=seed)
        attachment.load_state_dict(attachment.state_dict() | {"step": first_step})
        _trained(model, range(first_step, 6))
        attachment.close()
    return sorted(seen)


def test_every_encoding_has_a_seed_of_its_own():
    found = values_of(run_ranks(2, seeds, 5, 0))
    number = 2 * 5 * 2 * 3  # ranks; compressed steps; worker and shard; parameters that are not exempt
    assert len({seed for rank in found for seed in rank}) == number == sum(map(len, found))
    assert all(0 <= seed < 2**63 for rank in found for seed in rank)


def test_seeds_depend_on_the_seed_and_the_step_alone():
    first, again, other = (values_of(run_ranks(2, seeds, seed, 0)) for seed in (5, 5, 6))
    assert first == again
    assert not {seed for rank in first for seed in rank} & {seed for rank in other for seed in rank}
    resumed = values_of(run_ranks(2, seeds, 5, 3))
    for rank in range(2):
        assert len(resumed[rank]) == 3 * 2 * 3 and set(resumed[rank]) < set(first[rank])


# -------------------------------------------------------------------- other dtypes


class Mixed(torch.nn.Module):
    """Two layers, the second in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(30, 20), torch.nn.Linear(20, 5).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)).double()).square().sum()


def mixed() -> str:
    torch.manual_seed(0)
    module = Mixed()
    plain = DistributedDataParallel(copy.deepcopy(module))
    model = DistributedDataParallel(module)
    attachment = attach(model, EFSignSGD())
    for step in range(3):
        x = torch.randn(4, 30, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for each in (plain, model):
            each.zero_grad()
            each(x).backward()
        assert torch.equal(module.second.weight.grad, plain.module.second.weight.grad)  # averaged exactly, as by DDP
        assert torch.equal(module.first.weight.grad, plain.module.first.weight.grad) == (step == 0)
    attachment.close()
    return digest_of(parameter.grad for parameter in module.parameters())


def test_a_model_with_gradients_that_cannot_be_compressed():
    assert len(set(values_of(run_ranks(2, mixed)))) == 1


# -------------------------------------------------------------------- late starts, two attachments, subgroups


def started_late() -> None:
    """Training is compressed from the fourth step on; before, the gradients have the bits of plain DDP."""
    plain, model, resumed = _wrapped(), _wrapped(), _wrapped()
    attachment = attach(model, EFSignSGD(), start_step=3)
    assert _trained(model, range(3)) == _trained(plain, range(3))
    assert attachment.residual_nbytes() == 0 and attachment.sent_nbytes_per_step() == 0
    state = attachment.state_dict()
    again = attach(resumed, EFSignSGD(), start_step=3)
    again.load_state_dict(state)
    resumed.module.load_state_dict(model.module.state_dict())
    compressed = _trained(model, range(3, 5))
    assert compressed != _trained(plain, range(3, 5))
    assert attachment.residual_nbytes() > 0 and attachment.sent_nbytes_per_step() > 0
    assert _trained(resumed, range(3, 5)) == compressed  # it counts the job's steps, not this process's
    attachment.close()
    again.close()


def test_compression_that_starts_late():
    run_ranks(2, started_late)


def late(steps: int, settings: dict[str, bool]) -> None:
    """An attachment that is made after ``steps`` steps of plain DDP compresses its first step, unless DDP has its first
    buckets then. A static graph has them in two steps."""
    settled = 0 if "find_unused_parameters" in settings else 2 if "static_graph" in settings else 1
    model, plain = _wrapped(**settings), _wrapped(**settings)
    assert _trained(model, range(steps)) == _trained(plain, range(steps))
    attachment = attach(model, BlockQuant())
    for step in range(steps, steps + 2):
        will_be_rebuilt = step == steps < settled
        is_exact = _trained(model, range(step, step + 1)) == _trained(plain, range(step, step + 1))
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
        model = _wrapped(seed)
        attachment = attach(model, sync.plan(model, compressor, program=program))
        _trained(model, range(6))
        apart.append(digest_of(model.parameters()))
        attachment.close()
    models = [_wrapped(seed) for seed, _, _ in settings]
    attachments = [
        attach(model, sync.plan(model, compressor, program=program))
        for model, (_, compressor, program) in zip(models, settings, strict=True)
    ]
    for step in range(6):
        for model in models:
            _trained(model, range(step, step + 1))
    assert [digest_of(model.parameters()) for model in models] == apart
    for attachment in attachments:
        attachment.close()
    return apart


def test_two_attachments_in_one_process():
    found = values_of(run_ranks(2, two_models))
    assert found[0] == found[1]


def on_a_subgroup() -> str | None:
    group = dist.new_group([0, 2])
    digest = None
    if dist.get_rank() != 1:
        model = _wrapped(group=group)
        attachment = attach(model, sync.plan(model, BlockQuant(), program=ALLTOALL))
        digest = _trained(model, range(6))
        assert attachment.state_dict()["world_size"] == 2
        assert attachment.state_dict()["rank"] == dist.get_rank() // 2
        attachment.close()
    dist.barrier()
    return digest


def test_a_model_on_some_of_the_ranks():
    first, outside, last = values_of(run_ranks(3, on_a_subgroup))
    assert first == last is not None and outside is None


def with_ignored_parameters() -> str:
    module = build("Mlp")
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["layers.2.weight"])
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    attachment = attach(model, BlockQuant())
    alone = copy.deepcopy(module)
    for step in range(4):
        batch = module.batch(step, dist.get_rank())
        model.zero_grad()
        alone.zero_grad()
        model(batch).backward()
        alone(batch).backward()
        assert torch.equal(module.layers[2].weight.grad, alone.layers[2].weight.grad)  # the gradient of this rank alone
    assert "layers.2.weight" not in [unit.parameter for unit in attachment.plan.units]
    attachment.close()
    return digest_of(p.grad for name, p in module.named_parameters() if name != "layers.2.weight")


def test_parameters_that_ddp_ignores_are_left_alone():
    assert len(set(values_of(run_ranks(2, with_ignored_parameters)))) == 1


def seeds_of_random_k() -> list[int]:
    return _seeds(RandomK(), 5, 0, summable=True)


def test_ranks_share_the_seeds_of_payloads_that_add_up():
    first, second = values_of(run_ranks(2, seeds_of_random_k))
    assert first == second
    assert len(set(first)) == len(first) == 5 * 2 * 6
