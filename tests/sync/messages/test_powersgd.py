"""PowerSGD through DDP: it matches PyTorch's hook, ranks stay equal, no gradient is lost, and bad values do not
persist."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as theirs
from torch.nn.parallel import DistributedDataParallel

import gckernels
from gckernels import PowerSGD
from gckernels.sync import attach
from gckernels.sync.programs.sizes import allreduce_sent_nbytes
from models import SMALL_BUCKETS
from ranks import run_ranks, values_of
from workloads import digest_of, summed, thinned, trained

ONE_BUCKET = 25.0  # MiB


def _backward(model: DistributedDataParallel, batch: Any) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(batch).backward()
    return {name: parameter.grad.clone() for name, parameter in trained(model).items()}


# -------------------------------------------------------------------- comparison with PyTorch's hook


class Wide(nn.Module):
    """Two matrices of full rank, a matrix too small to compress, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(48, 70), nn.Tanh(), nn.Linear(70, 44), nn.Tanh(), nn.Linear(44, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().sum(1).mean()


_groups_of_the_hook: list[Any] = []


def differences_from_the_hook(rank_: int, steps: int) -> list[tuple[float, float]]:
    """For every step: the largest difference between the gradients of gckernels and of the hook, and the largest
    gradient.

    Both models have the same parameters and batches and begin with the hook's random numbers.
    """
    rank = dist.get_rank()
    torch.manual_seed(0)
    module = Wide().double().float()
    other = copy.deepcopy(module)
    ours, hooked = (DistributedDataParallel(each, bucket_cap_mb=ONE_BUCKET) for each in (module, other))
    # The hook's last callback drops its reference to the group on a thread of that group, after the step has ended.
    # This must not be the last reference: the group would join its threads, that one included, and abort the process.
    _groups_of_the_hook.append(dist.group.WORLD)
    start = 2  # the earliest step that the hook allows
    state = theirs.PowerSGDState(
        None, rank_, start_powerSGD_iter=start, min_compression_rate=1, orthogonalization_epsilon=0, random_seed=5
    )
    hooked.register_comm_hook(state, theirs.powerSGD_hook)
    attachment = attach(ours, PowerSGD(rank=rank_), start_step=start)
    found = []
    for step in range(steps):
        x = torch.randn(64, 48, generator=torch.Generator().manual_seed(100 * step + rank))
        if step == start:
            state_dict = attachment.state_dict()
            state_dict["feedback"]["q"] = _first_factors(rank_, attachment.plan, ours)
            state_dict["units"] = list(state_dict["feedback"]["q"])
            for name in state_dict["units"]:
                state_dict["feedback"]["worker"][name] = torch.zeros(dict(ours.module.named_parameters())[name].numel())
            attachment.load_state_dict(state_dict)
        got, expected = _backward(ours, x), _backward(hooked, x)
        found.append(
            (
                max((got[name] - expected[name]).abs().max().item() for name in got),
                max(grad.abs().max().item() for grad in expected.values()),
            )
        )
    attachment.close()
    return found


def _first_factors(rank: int, plan: Any, model: DistributedDataParallel) -> dict[str, torch.Tensor]:
    """The hook's random factors of its first step, drawn in the order of gradients in the bucket, last layer first."""
    import numpy

    generator = torch.Generator().manual_seed(int(numpy.random.RandomState(5).randint(1_000_000_000)))
    factors = {}
    matrices = [unit for unit in plan.units if isinstance(unit.compressor, PowerSGD)]
    for unit in reversed(matrices):
        _, cols = unit.compressor.sides(unit.numel)
        factors[unit.parameter] = torch.randn(cols, rank, generator=generator).T.contiguous().view(-1)
    return factors


@pytest.mark.parametrize("rank", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_gradients_of_the_hook_of_pytorch(rank):
    for found in values_of(run_ranks(2, differences_from_the_hook, rank, 8)):
        assert found[0][0] == found[1][0] == 0.0
        for difference, largest in found:
            assert largest > 0
            # An entry of an fp32 product is a sum of at most 70 terms (64 samples for the gradients themselves), each
            # with an error of at most u = 2**-24. The residual carries differences through the six steps.
            assert difference <= 6 * 70 * 2.0**-24 * largest, found


# -------------------------------------------------------------------- given gradients

SHAPES = {"first": (40, 33), "vector": (9,), "second": (24, 5, 7), "small": (3, 3)}
MATRICES = ("first", "second")
ONE_SIDED = "PowerSGD(one_sided=True)"


class Given(nn.Module):
    """A model whose gradients are its inputs."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weights = nn.ParameterDict({name: torch.zeros(shape, dtype=dtype) for name, shape in SHAPES.items()})

    def forward(self, grads: dict[str, torch.Tensor]) -> torch.Tensor:
        return sum(((self.weights[name] * grad).sum() for name, grad in grads.items()), torch.zeros(()))


def gradients(kind: str, step: int, rank: int) -> dict[str, torch.Tensor]:
    """This rank's gradients in a step. With ``"low"`` the mean over the ranks has rank 2; with ``"nan"`` or ``"inf"``
    one element of the last rank's gradients has that value."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    grads = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    if kind == "zero":
        return {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    if kind == "low":
        shared = torch.Generator().manual_seed(7)
        for name in MATRICES:
            rows, cols = grads[name].flatten(1).shape
            left, right = torch.randn(rows, 2, generator=shared), torch.randn(2, cols, generator=shared)
            grads[name] = (left * (rank + 1) @ right).view(SHAPES[name])
    if kind in ("nan", "inf") and rank == dist.get_world_size() - 1:
        grads["first"][3, 4] = float(kind)
    return grads


def synchronised(spec: str, kinds: list[str], bucket_cap_mb: float = SMALL_BUCKETS, start_step: int = 0) -> list[Any]:
    """For every step: the synchronised gradients, the mean of the ranks' gradients, and the state."""
    model = DistributedDataParallel(Given(), bucket_cap_mb=bucket_cap_mb)
    attachment = attach(model, gckernels.from_spec(spec), start_step=start_step)
    found = []
    for step, kind in enumerate(kinds):
        mine = gradients(kind, step, dist.get_rank())
        got = {name.removeprefix("weights."): grad for name, grad in _backward(model, mine).items()}
        mean = {name: summed(grad.clone()) / dist.get_world_size() for name, grad in mine.items()}
        feedback = attachment.state_dict()["feedback"]
        kept = {
            kind: {name.removeprefix("weights."): each for name, each in feedback[kind].items()} for kind in feedback
        }
        found.append((got, mean, kept))
    attachment.close()
    return found


def missing(found: list[Any], name: str) -> list[float]:
    """After every step, the norm of the sum of all errors so far, relative to the largest gradient's norm."""
    short = torch.zeros(SHAPES[name], dtype=torch.float64)
    largest = max(mean[name].norm().item() for _, mean, _ in found)
    norms = []
    for got, mean, _ in found:
        short += mean[name].double() - got[name]
        norms.append(short.norm().item() / largest)
    return norms


SPECS = ("PowerSGD", "PowerSGD(warm_start=False)", ONE_SIDED)
STEPS = (["low"] * 7, ["low"] * 4 + ["zero"] + ["low"] * 2, ["zero"] * 3 + ["low"] * 2)


# every fifth setting covers all of each
@pytest.mark.parametrize(("kinds", "world_size", "spec"), thinned(itertools.product(STEPS, (2, 3), SPECS), 5))
def test_matrices_of_lower_rank_come_out_as_they_are(world_size, spec, kinds):
    """This holds after zero gradients, too, when the factors are rounding noise or zero, and surplus columns do no
    harm.

    The one-sided form begins odd steps with a random space; the next step sends the part outside it.
    """
    for found in values_of(run_ranks(world_size, synchronised, spec, kinds)):
        for name in MATRICES:
            norms = missing(found, name)
            if spec == ONE_SIDED:
                assert "low" not in kinds[1:2] or norms[1] > 0.1
                norms = norms[2::2]
            # There are seven steps. An entry of a factor is a sum of at most 40 terms. Residuals are up to ten times as
            # large as gradients, because the differences between ranks add up in them.
            assert max(norms) <= 7 * 40 * 10 * 2.0**-24


@pytest.mark.parametrize("spec", ["PowerSGD", ONE_SIDED])
def test_zeros_change_nothing(spec):
    for found in values_of(run_ranks(2, synchronised, spec, ["zero"] * 4)):
        for got, _, kept in found:
            assert not any(grad.any() for grad in got.values())
            assert not any(tensor.any() for kind in kept.values() for tensor in kind.values())


# every fifth setting covers all of each
@pytest.mark.parametrize(("value", "at", "spec"), thinned(itertools.product(("nan", "inf"), (2, 3), SPECS), 5))
def test_what_is_not_finite_shows_on_all_ranks_and_is_not_remembered(spec, value, at):
    kinds = ["random"] * 7
    kinds[at] = value
    for found in values_of(run_ranks(3, synchronised, spec, kinds)):
        for step, (got, _, kept) in enumerate(found):
            assert got["first"].isfinite().all() == (step != at)
            assert all(got[name].isfinite().all() for name in SHAPES if name != "first")
            assert all(tensor.isfinite().all() for kind in kept.values() for tensor in kind.values())
        assert found[at][0]["first"].isnan().all()
        before, after = found[at - 1][2], found[at][2]
        for kind in before:
            for name in before[kind]:
                changes = name != "first" and not (spec == ONE_SIDED and kind == "pq"[1 - at % 2])
                assert torch.equal(before[kind][name], after[kind][name]) != changes, (kind, name)


@pytest.mark.parametrize("spec", ["PowerSGD", "PowerSGD(rank=1)", ONE_SIDED])
def test_buckets_make_no_difference(spec):
    kinds = ["random"] * 4
    one, many = (values_of(run_ranks(2, synchronised, spec, kinds, size)) for size in (ONE_BUCKET, SMALL_BUCKETS / 5))
    for of_one, of_many in zip(one, many, strict=True):
        for (got, _, kept), (other, _, kept_other) in zip(of_one, of_many, strict=True):
            assert digest_of(got.values()) == digest_of(other.values())
            assert all(torch.equal(each, kept_other[kind][name]) for kind in kept for name, each in kept[kind].items())


@pytest.mark.parametrize(("spec", "start_step"), thinned(itertools.product(("PowerSGD", ONE_SIDED), (1, 2, 3)), 2))
def test_compression_that_starts_late(spec, start_step):
    for found in values_of(run_ranks(2, synchronised, spec, ["random"] * 6, SMALL_BUCKETS, start_step)):
        for step, (got, mean, kept) in enumerate(found):
            exact = all(torch.allclose(got[name], mean[name], rtol=1e-6, atol=1e-6) for name in MATRICES)
            assert exact == (step < start_step)
            assert bool(kept["worker"]) == (step >= start_step)


def test_one_side_in_turn():
    """Even steps change P, odd ones Q."""
    for found in values_of(run_ranks(2, synchronised, ONE_SIDED, ["random"] * 6)):
        for step in range(2, 6):
            before, after = found[step - 1][2], found[step][2]
            for name in MATRICES:
                assert torch.equal(before["p"][name], after["p"][name]) == (step % 2 == 1)
                assert torch.equal(before["q"][name], after["q"][name]) == (step % 2 == 0)


def sent(spec: str) -> float:
    model = DistributedDataParallel(Given())
    attachment = attach(model, gckernels.from_spec(spec))
    for step in range(3):
        _backward(model, gradients("random", step, dist.get_rank()))
    attachment.close()
    return attachment.sent_nbytes_per_step()


def test_bytes_on_the_wire():
    # at rank 2 the factors have 40, 33, 24 and 35 rows of 8 bytes, padded to 16; two vectors of 9 numbers are exact
    factors = [320, 272, 192, 288]
    both = [*factors, 48, 48]
    half = [296, 240, 48, 48]
    for spec, nbytes in (("PowerSGD(rank=2)", both), ("PowerSGD(rank=2, one_sided=True)", half)):
        for world_size in (2, 3):
            expected = sum(allreduce_sent_nbytes(each, world_size) for each in nbytes)
            assert values_of(run_ranks(world_size, sent, spec)) == pytest.approx([expected] * world_size, rel=1e-15)
