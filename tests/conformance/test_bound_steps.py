"""On a GPU, a step of bound units launches kernels and clears memory, nothing else.

Anything more would keep a CUDA graph from capturing the step, or make the host wait: new memory, copies, numbers that
are read back.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from configurations import DEFAULTS, parametrize

from gckernels.codec import SEED_MASK, Decoding, Encoding, Recoding
from gckernels.ops.powersgd import kernels as powersgd
from gckernels.toolkit.kernels import sharing
from gckernels.toolkit.kernels.launch import Launch, record_launches
from helpers import KERNEL_PARAM, Operations, assert_equal, encode, number

SIZES = (1, 1500, 5000, 20_000)


def host_work(work: Callable[[], None]) -> list[str]:
    """The torch operations of a later step, in which the kernels are not run."""
    with record_launches():
        work()
        with Operations() as found:
            work()
    return [name for name, *_ in found.calls]


def launches(work: Callable[[], None]) -> list[Launch]:
    with record_launches() as recorded:
        work()
    return recorded


def works(compressor, added: torch.Tensor) -> dict[str, Callable[[], None]]:
    """The bound works of the back end for GPUs, by name."""
    encodings, decodings, recodings = [], [], []
    for numel in SIZES:
        grad, states = torch.empty(numel), torch.empty(compressor.traits.states * numel)
        payloads = torch.empty(2, 1, compressor.payload_nbytes(numel), dtype=torch.uint8)
        encodings.append(Encoding(compressor, grad, states, payloads[0], 0, numel))
        decodings.append(Decoding(compressor, payloads, grad, numel))
        shard = torch.empty(compressor.shard_compressor.traits.states * numel)
        recodings.append(Recoding(compressor, payloads[:, 0], shard, torch.empty_like(payloads[0, 0]), numel, 0, numel))
    triton = compressor.triton
    return {
        "encode": triton.bind_encodes(encodings, 1.0, added),
        "decode": triton.bind_decodes(decodings),
        "recode": triton.bind_recodes(recodings, 1.0, added),
    }


@parametrize(among=DEFAULTS)
@pytest.mark.parametrize("own_launch", [0, sharing.OWN_LAUNCH], ids=["one by one", "together"])
def test_a_step_of_bound_units_only_launches(compressor, own_launch, monkeypatch):
    monkeypatch.setattr(sharing, "OWN_LAUNCH", own_launch)
    for name, work in works(compressor, number(5)).items():
        found = host_work(work)
        assert set(found) <= {"aten.zero_.default"}, (name, found)


@parametrize(among=DEFAULTS)
@pytest.mark.parametrize("own_launch", [0, sharing.OWN_LAUNCH], ids=["one by one", "together"])
def test_steps_launch_the_same_with_the_same_arguments(compressor, own_launch, monkeypatch):
    """A CUDA graph repeats the arguments of the step that it has captured. With a number that changes as an argument,
    all replays would draw the same random numbers."""
    monkeypatch.setattr(sharing, "OWN_LAUNCH", own_launch)
    added = number(5)
    for name, work in works(compressor, added).items():
        first = launches(work)
        added += 1
        assert launches(work) == first, name
        if compressor.traits.stochastic and name == "encode":
            assert any(each is added for launch in first for each in (*launch.args, *launch.constexprs.values()))


@pytest.mark.parametrize("implementation", [KERNEL_PARAM])
@pytest.mark.parametrize("spec", ["TernGrad", "QSGD"])
@pytest.mark.parametrize("own_launch", [0, sharing.OWN_LAUNCH], ids=["one by one", "together"])
def test_launches_that_are_repeated_draw_the_numbers_of_every_step(spec, own_launch, implementation, monkeypatch):
    """The launches of one step, repeated as by a CUDA graph, give the payloads of calls with the seed of each step."""
    monkeypatch.setattr(sharing, "OWN_LAUNCH", own_launch)
    compressor, numel, seed, added = DEFAULTS[spec], 300, 3, number(-5, implementation.device)
    grad, payload = torch.randn(numel), torch.zeros(1, compressor.payload_nbytes(numel), dtype=torch.uint8)
    moved = [tensor.to(implementation.device) for tensor in (grad, payload)]
    unit = Encoding(compressor, moved[0], None, moved[1], seed, numel)
    step = launches(compressor.triton.bind_encodes([unit], 1.0, added))
    drawn = set()
    for number_of_step in range(-4, -1):
        added += 1
        for launch in step:
            launch.run()
        want, _ = encode(implementation, compressor, grad, seed=(seed + number_of_step) & SEED_MASK)
        assert_equal(unit.payload.cpu(), want)
        drawn.add(want.numpy().tobytes())
    assert len(drawn) == 3


def test_a_step_of_bound_matrices_only_launches():
    rank, shapes = 2, ((3, 5), (40, 30), (300, 20))
    grads, residuals = ([torch.empty(rows * cols) for rows, cols in shapes] for _ in range(2))
    left, right = ([torch.empty(rank, shape[side]) for shape in shapes] for side in range(2))
    bound = (
        powersgd.bind_left(grads, residuals, right, left, 0.5),
        powersgd.bind_right(grads, residuals, left, right, 0.5),
        powersgd.bind_reconstruct(left, right, grads, residuals),
        powersgd.bind_orthogonalise(left, None),
        powersgd.bind_orthogonalise(left, [1, 2, 3], number(5)),
        powersgd.bind_keep(left, [torch.empty_like(each) for each in left]),
    )
    for work in bound:
        assert set(host_work(work)) <= {"aten.zero_.default"}


def test_new_memory_in_a_step_is_found():
    assert "aten.empty.memory_format" in host_work(lambda: torch.empty(16))
