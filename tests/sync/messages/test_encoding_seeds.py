"""Seeds of encodings: each has its own, which follows from the seed of the training and the step."""

from __future__ import annotations

import pytest

from ddp_models import trained, wrapped
from gckernels import BlockQuant, Codec, RandomK, sync
from gckernels.codec import SEED_MASK
from gckernels.sync import attach
from gckernels.sync.messages import codings
from gckernels.sync.programs import ALLTOALL
from ranks import run_ranks, values_of


def seeds(seed: int, first_step: int) -> list[int]:
    """The seeds that this rank encodes with in the first six steps, for payloads that cannot be summed."""
    return _seeds(BlockQuant(), seed, first_step, summable=False)


def _seeds(compressor: Codec, seed: int, first_step: int, summable: bool) -> list[int]:
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
        model = wrapped()
        attachment = attach(model, sync.uniform_plan(model, compressor, program=ALLTOALL), seed=seed)
        attachment.load_state_dict(attachment.state_dict() | {"step": first_step})
        trained(model, range(first_step, 6))
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


def seeds_of_random_k() -> list[int]:
    return _seeds(RandomK(), 5, 0, summable=True)


def test_ranks_share_the_seeds_of_payloads_that_add_up():
    first, second = values_of(run_ranks(2, seeds_of_random_k))
    assert first == second
    assert len(set(first)) == len(first) == 5 * 2 * 6
