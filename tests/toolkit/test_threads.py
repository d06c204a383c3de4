"""Results of the host path do not depend on its number of threads."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

import gckernels
from gckernels import Traits
from gckernels.codec import Decoding, Encoding
from gckernels.toolkit.host import library, threads
from gckernels.toolkit.quantizer import MAX, MIN, SUM, MapQuantizer, Maps, Statistic
from ranks import run_ranks, values_of


@dataclass(frozen=True)
class AllStatistics(MapQuantizer):
    """A quantiser without kernels, with random numbers and every kind of reduction, over a block or the whole unit."""

    traits = Traits(stochastic=True)
    bits: ClassVar[int] = 4
    block: int | None = None
    maps = Maps(
        quantize=lambda values, stats, dither, C: torch.where((dither - 128.0) * stats[1] < values - stats[2], 9, 4),
        dequantize=lambda codes, stats, C: codes.float() * stats[0] + stats[1] * 0.0,
        statistic=Statistic(
            kinds=(SUM, MAX, MIN),
            terms=lambda values, C: (values * values, values, values),
            finish=lambda partials, count, C: (partials[0] / count, partials[1], partials[2]),
            size=3,
        ),
    )


COMPRESSORS = {
    "whole unit": AllStatistics(),
    "blocks": AllStatistics(block=256),
    "sign, whole unit": gckernels.EFSignSGD(block=None),
    "cast": gckernels.Cast16(),
}
PART_NUMEL = library.PART * library.TILE


@pytest.fixture(autouse=True)
def _number_restored():
    yield
    gckernels.set_num_threads(None)


def results(compressor, grad: torch.Tensor, residual: torch.Tensor, chunks: int = 1) -> tuple[torch.Tensor, ...]:
    """The payloads, the new residual, and the values decoded from both payloads."""
    size = gckernels.chunk_numel(grad.numel(), chunks)
    payloads = torch.zeros(2, chunks, compressor.payload_nbytes(size), dtype=torch.uint8)
    residual, out = residual.clone(), torch.zeros_like(grad)
    compressor.host.encode(Encoding(compressor, grad, residual, payloads[0], 5, size))
    compressor.host.encode(Encoding(compressor, residual, None, payloads[1], 6, size))
    compressor.host.decode(Decoding(compressor, payloads, out, size), 0.5)
    return payloads, residual, out


@pytest.mark.parametrize("name", COMPRESSORS)
@pytest.mark.parametrize(("numel", "chunks"), [(PART_NUMEL * 3 + 77, 1), (PART_NUMEL * 5, 2), (PART_NUMEL * 4 - 9, 3)])
def test_results_do_not_depend_on_the_number_of_threads(name, numel, chunks):
    grad, residual = torch.randn(numel), torch.randn(numel)
    gckernels.set_num_threads(1)
    want = results(COMPRESSORS[name], grad, residual, chunks)
    for number in (2, 3, 16):
        gckernels.set_num_threads(number)
        for got, wanted in zip(results(COMPRESSORS[name], grad, residual, chunks), want, strict=True):
            assert torch.equal(got, wanted), f"{number} threads"


def test_results_do_not_depend_on_other_callers():
    """Four Python threads share one pool, as an engine's lanes do."""
    grads = [torch.randn(PART_NUMEL * 3 + 5) for _ in range(8)]
    residual = torch.zeros_like(grads[0])
    gckernels.set_num_threads(1)
    want = [results(COMPRESSORS["whole unit"], grad, residual) for grad in grads]
    gckernels.set_num_threads(2)
    with ThreadPoolExecutor(4) as callers:
        for _ in range(3):
            got = callers.map(lambda grad: results(COMPRESSORS["whole unit"], grad, residual), grads)
            for each, wanted in zip(got, want, strict=True):
                assert all(map(torch.equal, each, wanted))


@pytest.mark.parametrize("count", [0, 1, 5, 63, 64, 65, 1000])
@pytest.mark.parametrize("number", [1, 2, 7])
def test_every_index_is_worked_on_once(count, number):
    gckernels.set_num_threads(number)
    seen: list[int] = []
    threads.run_parts(lambda start, stop: seen.extend(range(start, stop)), count, min_part=8)
    assert sorted(seen) == list(range(count))


def test_parts_run_at_once_and_are_not_too_small():
    gckernels.set_num_threads(2)
    together = threading.Barrier(2, timeout=30)  # breaks, with an error, unless two threads come
    parts = []

    def work(start, stop):
        parts.append(stop - start)
        if start in (0, 64):
            together.wait()

    threads.run_parts(work, 128, min_part=64)
    assert parts == [64, 64]
    parts.clear()
    threads.run_parts(lambda start, stop: parts.append((start, stop)), 127, min_part=64)
    assert parts == [(0, 127)], "one call, where there is not enough work for two threads"


def test_a_busy_pool_does_not_hold_a_call_up():
    """The calling thread does the parts that no other thread begins."""
    gckernels.set_num_threads(2)
    release, begun = threading.Event(), threading.Semaphore(0)
    workers = os.cpu_count() or 2  # at least the size of the pool

    def block():
        begun.release()
        release.wait(60)

    blocked = [threads._threads().submit(block) for _ in range(workers)]
    begun.acquire(timeout=30)
    try:
        seen: list[int] = []
        threads.run_parts(lambda start, stop: seen.extend(range(start, stop)), 1000, min_part=8)
        assert sorted(seen) == list(range(1000))
    finally:
        release.set()
        for each in blocked:
            each.result()


@pytest.mark.parametrize("place", [0, 500, 999])
def test_errors_in_a_part_are_raised_when_all_have_ended(place):
    gckernels.set_num_threads(3)
    running = []

    def work(start, stop):
        running.append(start)
        try:
            if start <= place < stop:
                raise KeyError("in a part")
        finally:
            running.remove(start)

    with pytest.raises(KeyError, match="in a part"):
        threads.run_parts(work, 1000, min_part=8)
    assert not running
    seen: list[int] = []
    threads.run_parts(lambda start, stop: seen.extend(range(start, stop)), 1000, min_part=8)
    assert len(seen) == 1000, "the next call works"


@pytest.mark.parametrize("wrong", [0, -1, 1.0, "2", True])
def test_a_wrong_number_is_refused(wrong):
    with pytest.raises(ValueError, match="num_threads must be a positive integer or None"):
        gckernels.set_num_threads(wrong)


def test_the_default_is_torchs_number():
    before = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            assert gckernels.get_num_threads() == number
        gckernels.set_num_threads(5)
        assert gckernels.get_num_threads() == 5
        gckernels.set_num_threads(None)
        assert gckernels.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def encode_in_parent_and_child() -> int:
    """Encode in this process, then here and in a forked child; returns the exit code of the child."""
    torch.set_num_threads(1)  # its own threads are not usable in a child
    gckernels.set_num_threads(2)
    compressor, grad = gckernels.EFSignSGD(block=1024), torch.randn(2**19)
    payload = torch.zeros(compressor.payload_nbytes(2**19), dtype=torch.uint8)
    compressor.encode(grad, None, payload)
    want, child = payload.clone(), os.fork()
    payload.zero_()
    compressor.encode(grad, None, payload)
    is_same = torch.equal(payload, want)
    if child == 0:
        os._exit(0 if is_same else 1)
    assert is_same
    threads._threads().shutdown()  # no thread may be left in a rank
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_gets_threads_of_its_own():
    """A child that hangs is killed with its rank."""
    assert values_of(run_ranks(1, encode_in_parent_and_child, fresh=True, exits=False, timeout_s=60)) == [0]
