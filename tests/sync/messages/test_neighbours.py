"""Units of one message are encoded and decoded together, with the same results as in separate messages."""

from __future__ import annotations

import pytest
import torch.distributed as dist

import gckernels
from gckernels import sync
from gckernels.sync import attach
from gckernels.sync.programs import ALLGATHER, ALLTOALL, ENCODED_ALLREDUCE, Program, ring
from models import build
from ranks import run_ranks, values_of
from workloads import digest_of

TOGETHER, ALONE = 25.0, 1e-6  # bucket sizes in megabytes: all units in one bucket, or one unit per bucket


def outcomes(spec: str, program: Program, find_unused: bool) -> list[str]:
    """The gradients and residuals of three steps, with each of the two bucket sizes."""
    found = []
    for bucket_cap_mb in (TOGETHER, ALONE):
        module = build("Mlp")
        attachment = attach(
            module,
            sync.uniform_plan(module, gckernels.from_spec(spec), program=program),
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused,
        )
        digests = []
        for step in range(3):
            module.zero_grad()
            module(module.batch(step, dist.get_rank())).backward()
            digests.append(digest_of(parameter.grad for parameter in module.parameters()))
        feedback = attachment.state_dict()["feedback"]
        digests.append(digest_of(tensor for kind in sorted(feedback) for _, tensor in sorted(feedback[kind].items())))
        attachment.close()
        found.append("".join(digests))
    return found


@pytest.mark.parametrize(
    ("spec", "program", "find_unused"),
    [
        ("EFSignSGD(block=None)", ALLTOALL, False),
        ("TernGrad", ALLGATHER, False),
        pytest.param("Cast16", ENCODED_ALLREDUCE, False, marks=pytest.mark.slow),
        ("BlockQuant", ring(2), False),
        ("BlockQuant", ALLTOALL, True),
        pytest.param("TopK(ratio=0.1)", ALLTOALL, False, marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_units_do_not_notice_their_neighbours(spec, program, find_unused):
    together, alone = zip(*values_of(run_ranks(2, outcomes, spec, program, find_unused)), strict=True)
    assert together == alone
