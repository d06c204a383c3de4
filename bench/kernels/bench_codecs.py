"""The compressors alone: encoding, decoding and recoding, on the CPU and on a GPU if there is one.

    pytest bench/kernels --benchmark-only
    pytest bench/kernels --benchmark-only -k "TopK and encode and 4Mi" --benchmark-autosave
    pytest bench/kernels --benchmark-only -k "TopK and encode and 4Mi" --benchmark-compare
    pytest bench/kernels --benchmark-only --compressors "EFSignSGD(block=1024)" --sizes 16Ki 4Mi

A group has a call of a compressor, a copy of as many bytes, and the reference in plain torch unless the size is too
large for it. On the CPU there is a group with one thread and one with torch's default number of threads. Caches are
warm. On a GPU a time includes the host's and waiting for the GPU; ``gpu_kernels.py`` times the kernels by themselves.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from bench.lib.cases import HOST_NUMEL, Case, all_cases, all_specs
from bench.lib.record import environment
from bench.lib.sizes import format_numel

_environment = functools.cache(environment)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test for every case, device and number of threads, group by group."""
    options = metafunc.config.option
    places = [("cpu", number) for number in sorted({1, torch.get_num_threads()})]
    places += [("cuda", torch.get_num_threads())] if torch.cuda.is_available() else []
    tests = []
    for case in all_cases(options.compressors or all_specs(), options.sizes or HOST_NUMEL):
        for device, threads in places:
            names = (case.spec, case.direction, str(case.sources), format_numel(case.numel), device, str(threads))
            for each in case.compared():
                name = "copy" if each.direction == "copy" else each.implementation
                tests.append(pytest.param("-".join(names), each, device, threads, id="-".join((*names, name))))
    metafunc.parametrize(("group", "case", "device_type", "threads"), tests)


def test_call(benchmark: BenchmarkFixture, group: str, case: Case, device_type: str, threads: int) -> None:
    device = torch.device(device_type)
    torch.set_num_threads(threads)
    call = case.prepare(device)

    def done() -> None:
        call()
        torch.cuda.synchronize()

    timed = done if device.type == "cuda" else call
    timed()  # compiles what is not compiled yet, and wakes all threads
    benchmark.group = group
    benchmark.extra_info |= {"case": dataclasses.asdict(case), "moved_nbytes": case.moved_nbytes} | _environment(device)
    benchmark(timed)
