"""Bound launches run in the interpreter, can be recorded, and pass the right arguments to a driver."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from gckernels import TopK
from gckernels.codec import Decoding
from gckernels.toolkit.kernels import launch_batch
from gckernels.toolkit.kernels.launch import BoundLaunch, Launch, launch, record_launches, temporary
from gckernels.toolkit.kernels.launch_batch import LaunchBackend
from helpers import KERNEL, KERNEL_PARAM
from processes import output_of


def bind_launch(kernel, grid, *args, num_warps=4, maxnreg=None, **constexprs) -> BoundLaunch:
    return BoundLaunch(Launch(kernel, grid, args, constexprs, num_warps, maxnreg))


@triton.jit
def _fill_kernel(out_ptr, value_ptr, COUNT: tl.constexpr):
    offsets = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out_ptr + offsets, tl.zeros((COUNT,), tl.float32) + tl.load(value_ptr))


def memory(value: float, device: str = "cpu") -> torch.Tensor:
    return torch.tensor([float(value)], device=device)


@pytest.mark.parametrize("implementation", [KERNEL_PARAM])
def test_a_bound_launch_reads_what_changes_from_memory(implementation):
    out, given = torch.zeros(48, device=implementation.device), memory(0, implementation.device)
    bound = bind_launch(_fill_kernel, (2,), out, given, COUNT=16)
    for value in (1, 5):
        given.fill_(value)
        bound()
        assert out.tolist() == [value] * 32 + [0.0] * 16


def test_a_bound_launch_is_recorded_like_any_other():
    out, value = torch.zeros(16), memory(7)
    bound = bind_launch(_fill_kernel, (1,), out, value, num_warps=2, maxnreg=64, COUNT=16)
    with record_launches() as recorded:
        bound()
        launch(_fill_kernel, (1,), out, value, num_warps=2, maxnreg=64, COUNT=16)
    assert recorded[0] == recorded[1]
    assert not out.any()


def test_an_empty_grid_runs_nothing():
    bound = bind_launch(_fill_kernel, (0,), None, None, COUNT=16)
    bound()
    with record_launches() as recorded:
        bound()
    assert recorded == []


def test_recording_is_of_one_thread():
    out = torch.zeros(16)
    with record_launches() as recorded:
        other = threading.Thread(target=launch, args=(_fill_kernel, (1,), out, memory(3)), kwargs={"COUNT": 16})
        if KERNEL.device == "cpu":
            other.start()
            other.join()
            assert out.tolist() == [3.0] * 16
    assert recorded == []


def test_works_share_memory_for_temporaries_that_goes_with_them():
    """The memory is as large as the largest unit needs, shared by all units, and freed with the last work that uses
    it."""
    payloads = [torch.empty(1, 1, TopK().payload_nbytes(numel), dtype=torch.uint8) for numel in (5000, 100, 9000)]
    units = [Decoding(TopK(), payload, torch.empty(100), 100) for payload in payloads]
    works = [TopK.triton.bind_decodes(some, 1.0, False) for some in (units[:1], units[1:])]
    largest = max(unit.nbytes for work in works for unit in work._units)
    for work in works * 2:
        with record_launches():
            work()
    (memory,) = launch_batch._of_thread.memory.values()
    assert memory.numel() == largest
    del works, work, memory
    assert not launch_batch._of_thread.memory


class _Decoder(LaunchBackend):
    def encode(self, unit, scale=1.0):
        raise NotImplementedError


def test_other_memory_than_temporaries_is_refused():
    class Careless(_Decoder):
        def decode(self, unit, scale=1.0, accumulate=False):
            launch(_fill_kernel, (1,), torch.empty(16), unit.out, COUNT=16)

    unit = Decoding(TopK(), torch.empty(1, 1, 16), torch.empty(16), 16)
    with pytest.raises(AssertionError, match="not a temporary"):
        Careless().bind_decodes([unit], 1.0, False)


def test_temporaries_are_zeroed_in_every_step():
    class Counting(_Decoder):
        def decode(self, unit, scale=1.0, accumulate=False):
            count = temporary(16, dtype=torch.float32, device=unit.out.device, zeroed=True)
            launch(_add_kernel, (1,), count, unit.out, COUNT=16)

    out = torch.zeros(16, device=KERNEL.device)
    work = Counting().bind_decodes([Decoding(TopK(), out.view(1, 1, 16), out, 16)] * 2)
    if KERNEL.device == "cpu":
        work()
        work()
        assert out.tolist() == [1.0] * 16


@triton.jit
def _add_kernel(count_ptr, out_ptr, COUNT: tl.constexpr):
    offsets = tl.arange(0, COUNT)
    count = tl.load(count_ptr + offsets) + 1.0
    tl.store(count_ptr + offsets, count)
    tl.store(out_ptr + offsets, count)


def test_bound_launches_pass_the_right_arguments_to_a_driver():
    assert output_of(Path(__file__).with_name("bound_launches.py")).count("check_") == 4
