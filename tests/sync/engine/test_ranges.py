"""A profiler of torch sees every stage on its lane; without one there are no ranges."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from gckernels import sync
from gckernels.sync.engine import ranges
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of


def train(compressor: str, program: str, around: AbstractContextManager[Any]) -> tuple[list[torch.Tensor], int]:
    """The gradients of a step inside ``around``, and its number of messages."""
    module, rank = build("Mlp"), dist.get_rank()
    hooked = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    attachment = sync.attach(hooked, sync.uniform_plan(hooked, compressor, program=program))
    hooked(module.batch(0, rank)).backward()
    hooked.zero_grad()
    attachment.record_next_step()
    with around:
        hooked(module.batch(1, rank)).backward()
    traced = attachment.recorded_step
    assert traced is not None
    attachment.close()
    return [parameter.grad for parameter in module.parameters()], len({stage.message for stage in traced.stages})


def train_twice(compressor: str, program: str) -> tuple[dict[str, int], int]:
    """The ranges of a step by name, each with how often it came, and the number of messages of the step."""
    config: Any = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    profiler = profile(activities=[ProfilerActivity.CPU], experimental_config=config)
    profiled, messages = train(compressor, program, profiler)
    plain, _ = train(compressor, program, contextlib.nullcontext())
    assert all(map(torch.equal, profiled, plain))
    return {each.key: each.count for each in profiler.key_averages() if each.key.startswith("gckernels::")}, messages


@pytest.mark.parametrize(
    ("compressor", "program", "expected"),
    [
        (
            "BlockQuant",
            "alltoall",
            {
                *("compute-0::Encode", "communicate-0-0::AllToAll", "compute-1::Recode"),
                *("communicate-1-0::AllGather", "compute-2::Decode"),
            },
        ),
        ("EFSignSGD", "allgather", {"compute-0::Encode", "communicate-0-0::AllGather", "compute-1::Decode"}),
    ],
)
def test_every_stage_is_a_range_of_its_lane(compressor, program, expected):
    for seen, messages in values_of(run_ranks(2, train_twice, compressor, program)):
        compressed = seen["gckernels::compute-0::Encode"]
        assert all(seen[f"gckernels::{name}"] == compressed for name in expected)
        assert 0 < compressed <= messages and 0 < seen[ranges.SUBMIT] <= messages


def test_nothing_is_wrapped_without_a_profiler():
    assert not ranges.is_profiling()
    assert ranges.observer(None, None, 0, 1) is None  # type: ignore[arg-type]
    with profile(activities=[ProfilerActivity.CPU]):
        assert ranges.is_profiling() and ranges.observer(None, None, 0, 1) is ranges.with_range  # type: ignore[arg-type]
    assert not ranges.is_profiling()
