"""Training through DDP: all ranks have the same bits, no gradient is lost, and exact parameters get DDP's result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import gckernels
from audits import Audit, Run, audit, balances, train
from gckernels.sync.programs import PROGRAMS
from models import SMALL_BUCKETS
from ranks import run_ranks, values_of
from workloads import combinations, one_of_each, thinned, with_two_or_three_ranks

SETTINGS = (
    ("BlockQuant(bits=4, block=32, scale_dtype='bfloat16')", "alltoall"),
    ("Cast16(dtype='float16')", "encoded_allreduce"),
    ("EFSignSGD(block=128)", "allgather"),
    ("EFSignSGD", "allreduce"),
)
"""Settings besides the default of every compressor."""


def audited(world_size: int, run: Run) -> Audit:
    """Run the audit on all ranks, check that they have the same bits and lose nothing, and return rank 0's audit."""
    found = values_of(run_ranks(world_size, audit, run))
    assert len({each.digest for each in found}) == 1, "the ranks' gradients or parameters differ"
    assert found[0].imbalance <= 1, "gradient is lost or invented"
    return found[0]


def with_world_sizes(settings: Sequence[tuple[str, str]]) -> pytest.MarkDecorator:
    """Parametrize a test with numbers of ranks: two and three for all settings, and four, the slowest, for the programs
    that are meant for many ranks. ``make test`` takes one setting of every compressor and program, alternates between
    two and three, and takes a few settings with four."""
    many = [setting for setting in settings if setting[1] in ("alltoall", "encoded_allreduce")]
    cases = with_two_or_three_ranks(settings, quick=one_of_each()) + thinned([(4, *setting) for setting in many], 18)
    return pytest.mark.parametrize(("world_size", "compressor", "program"), cases)


# the test after this one covers all settings, in fewer steps and with other numbers of ranks
@pytest.mark.parametrize(("compressor", "program"), [*thinned(combinations(), 40), *SETTINGS])
@pytest.mark.parametrize("steps", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_many_steps_leave_the_same_bits_on_every_rank(steps, compressor, program):
    found = values_of(run_ranks(3, train, Run(compressor, program, steps=steps)))
    assert len(set(found)) == 1


@with_world_sizes(combinations())
def test_every_step_against_plain_ddp(world_size, compressor, program):
    """See :func:`audits.audit` for the checks."""
    found = audited(world_size, Run(compressor, program))
    assert found.buckets > 1 or program == "allreduce"  # which leaves the buckets to DDP
    exact = compressor == "Identity" or (compressor == "Cast16" and program == "encoded_allreduce")
    if not exact and balances(gckernels.from_spec(compressor)):
        # the residuals' share is large, so the audit would notice if it were missing
        assert found.withheld > 10


CASES: dict[str, dict[str, Any]] = {
    "one_bucket": {"model": "Zoo", "options": {}},
    "buckets": {"model": "Zoo"},
    "bucket_views": {"model": "Zoo", "options": {"bucket_cap_mb": SMALL_BUCKETS, "gradient_as_bucket_view": True}},
    "static_graph": {"model": "Zoo", "options": {"bucket_cap_mb": SMALL_BUCKETS, "static_graph": True}},
    "bf16": {"model": "Zoo", "dtype": torch.bfloat16},
    "fp16": {"model": "Zoo", "dtype": torch.float16},
    "no_sync": {"model": "Zoo", "micro_batches": 3},
    "no_sync_bucket_views": {
        "model": "Zoo",
        "micro_batches": 2,
        "options": {"bucket_cap_mb": SMALL_BUCKETS, "gradient_as_bucket_view": True},
    },
    "unused": {
        "model": "Branches",
        "steps": 6,
        "options": {"bucket_cap_mb": SMALL_BUCKETS, "find_unused_parameters": True},
    },
    "unused_bucket_views": {
        "model": "Branches",
        "steps": 6,
        "options": {
            "bucket_cap_mb": SMALL_BUCKETS,
            "find_unused_parameters": True,
            "gradient_as_bucket_view": True,
        },
    },
    "unused_no_sync": {
        "model": "Branches",
        "steps": 6,
        "micro_batches": 2,
        "options": {"bucket_cap_mb": SMALL_BUCKETS, "find_unused_parameters": True},
    },
    "unused_static_graph": {"model": "Partly", "options": {"bucket_cap_mb": SMALL_BUCKETS, "static_graph": True}},
}


FRONTS = (
    (2, "BlockQuant", "allgather"),
    (3, "EFSignSGD", "alltoall"),
    (2, "Cast16", "encoded_allreduce"),
    (3, "PowerSGD(rank=2)", "powersgd"),
    (2, "PowerSGD(one_sided=True)", "encoded_allreduce"),
)


# every fourth setting covers all cases and all five front ends
@pytest.mark.parametrize(
    ("case", "world_size", "compressor", "program"), thinned([(case, *front) for case in CASES for front in FRONTS], 4)
)
def test_all_kinds_of_parameters_and_of_ddp(case, world_size, compressor, program):
    found = audited(world_size, Run(compressor, program, **CASES[case]))
    assert (found.buckets == 1) == (case == "one_bucket")


@pytest.mark.parametrize(
    ("world_size", "case"), with_two_or_three_ranks((case,) for case in ("one_bucket", "buckets", "bf16", "unused"))
)
def test_every_parameter_in_a_way_of_its_own(world_size, case):
    audited(world_size, Run("mixed", "mixed", **CASES[case]))


# every fourth setting covers all cases and all programs
@pytest.mark.parametrize(
    ("case", "program"),
    thinned([(case, each) for case in ("buckets", "bucket_views", "no_sync", "unused") for each in PROGRAMS], 4),
)
def test_identity_is_plain_ddp(case, program):
    """Between two ranks the bits are equal, for every program and kind of parameter."""
    audited(2, Run("Identity", program, **CASES[case]))
