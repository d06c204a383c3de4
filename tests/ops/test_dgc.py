"""DGC equals the paper's algorithm, which is written here once more. Its selection, clipping and schedule are also
tested alone."""

from __future__ import annotations

import math

import pytest
import torch

from gckernels import DGC, Traits, chunk_numel, set_num_threads
from gckernels.toolkit.sparsifier.keys import keys_of, kth_largest, sample_positions, sample_rank
from gckernels.toolkit.sparsifier.states import launch_factor
from helpers import (
    HOST,
    HOST_PARAM,
    INTERPRETED_SLOWLY,
    KERNEL_PARAM,
    REFERENCE_PARAM,
    assert_equal,
    decode_one,
    encode,
    zero_residual,
)

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [HOST_PARAM, KERNEL_PARAM, REFERENCE_PARAM])


class Paper:
    """Algorithm 1 of Lin et al. for one rank in plain torch, with momentum correction, factor masking, clipping and
    warm-up. The sampled positions are those of gckernels, because they depend only on random numbers."""

    RATIOS = (0.25, 0.0625, 0.015625, 0.004)

    def __init__(self, config: DGC, numel: int) -> None:
        self.config = config
        self.u, self.v = torch.zeros(numel), torch.zeros(numel)

    def step(self, grad: torch.Tensor, step: int, seed: int) -> torch.Tensor:
        """The sparse vector that a step sends."""
        config, numel = self.config, grad.numel()
        if config.clip is not None:  # section 3.3: the mean's threshold over the root of the number of workers
            limit = config.clip / math.sqrt(config.workers)
            norm = float(grad.double().norm())
            if norm > limit:
                grad = grad * torch.tensor(limit / norm, dtype=torch.float32)
        if config.nesterov:
            self.u = config.momentum * (self.u + grad)
            self.v = self.v + self.u + grad
        else:
            self.u = config.momentum * self.u + grad
            self.v = self.v + self.u
        k = math.ceil(numel * self.ratio(step))
        magnitudes = self.v.abs()
        sample = magnitudes[sample_positions(numel, seed, 0)]
        threshold = sample.sort(descending=True).values[sample_rank(k, numel) - 1]
        mask = (magnitudes >= threshold) & (magnitudes > 0)
        if int(mask.sum()) > k:  # section 3.1, hierarchical: the largest among those that pass
            mask = torch.zeros(numel, dtype=torch.bool)
            mask[magnitudes.sort(descending=True, stable=True).indices[:k]] = True
        sent = torch.where(mask, self.v, 0.0)
        self.u[mask] = 0.0
        self.v[mask] = 0.0
        return sent

    def ratio(self, step: int) -> float:
        stage = 4 * step // self.config.warmup_steps if step < self.config.warmup_steps else 4
        return max((*self.RATIOS, self.config.ratio)[stage], self.config.ratio)


CASES = {
    "default": DGC(),
    "momentum": DGC(ratio=0.01, momentum=0.5),
    "nesterov": DGC(ratio=0.01, nesterov=True),
    "clip": DGC(ratio=0.02, clip=30.0, workers=4),
    "nesterov and clip": DGC(ratio=0.02, momentum=0.7, nesterov=True, clip=30.0, workers=2),
    "no momentum": DGC(ratio=0.01, momentum=0.0),
    "no momentum, clip": DGC(ratio=0.01, momentum=0.0, clip=20.0),
    "warm-up": DGC(ratio=0.005, warmup_steps=6),
    "all": DGC(ratio=1.0),
}


INTERPRETED = ("nesterov and clip", "warm-up")


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in INTERPRETED else INTERPRETED_SLOWLY) for case in CASES]
)
def test_every_step_is_the_papers(case, implementation):
    """The sent values, u and v equal the paper's to the last bit."""
    config, numel = CASES[case], 5000
    paper, state = Paper(config, numel), zero_residual(config, numel)
    generator = torch.Generator().manual_seed(1)
    sent_of_last = None
    for step in range(9 if implementation == HOST else 4):  # the interpreter is slow
        # every third step has small integers, many of them equal, so that the order of ties counts
        grad = torch.randn(numel, generator=generator)
        if step % 3 == 2:
            grad = grad.mul(2).round()
        want = paper.step(grad, step, seed=step)
        payload, state = encode(implementation, config.at_step(step), grad, state, seed=step)
        assert_equal(decode_one(config.at_step(step), payload, numel), want, f"sent in step {step}")
        assert want.any()
        velocity, kept = state[:numel], state[state.numel() - numel :]
        assert_equal(kept, paper.v, f"v after step {step}")
        if config.momentum:
            assert_equal(velocity, paper.u, f"u after step {step}")
        assert sent_of_last is None or not torch.equal(want, sent_of_last)
        sent_of_last = want


@IMPLEMENTATIONS
@pytest.mark.parametrize("value_bits", [16, 8, 4, 2])
def test_short_values_keep_what_they_leave_out(implementation, value_bits):
    """The error of short values stays in ``v``; ``u`` is masked wherever a value was sent."""
    config, numel = DGC(ratio=0.1, value_bits=value_bits), 700
    grad, state = torch.randn(numel), torch.randn(2 * numel)
    velocity = state[:numel] * 0.9 + grad
    values = state[numel:] + velocity
    payload, state = encode(implementation, config, grad, state)
    decoded = decode_one(config, payload, numel)
    assert 0 < decoded.count_nonzero() <= 70
    assert_equal(state[numel:], values - decoded)
    assert (state[numel:] != 0)[decoded != 0].any()
    assert_equal(state[:numel], torch.where(decoded == 0, velocity, 0.0))


@IMPLEMENTATIONS
def test_nothing_is_lost_but_what_is_masked(implementation):
    """Each gradient finally contributes g / (1 - m), as with momentum SGD, except for the masked part of the
    velocity."""
    config, numel, m = DGC(ratio=0.05, momentum=0.5), 600, 0.5
    state, contributed, applied = torch.zeros(2 * numel), torch.zeros(numel).double(), torch.zeros(numel).double()
    masked = torch.zeros(numel).double()
    for step in range(6):
        grad = torch.randn(numel)
        velocity = state[:numel] * m + grad
        payload, state = encode(implementation, config, grad, state, chunks=2, seed=step)
        decoded = decode_one(config, payload, numel)
        contributed += grad.double() / (1 - m)
        applied += decoded.double()
        masked += torch.where(decoded != 0, velocity, 0.0).double() * m / (1 - m)
    waiting = state[numel:].double() + state[:numel].double() * m / (1 - m)
    # in each step a handful of fp32 roundings of numbers below 32
    assert ((contributed - applied - waiting - masked).abs() <= 6 * 5 * 32 * 2.0**-24).all()
    assert masked.any()


# -------------------------------------------------------------------- selection


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    ("ratio", "values"),
    [
        (0.002, "normal"),
        *(pytest.param(0.002, values, marks=INTERPRETED_SLOWLY) for values in ("few", "equal", "steps")),
        *(pytest.param(0.05, values, marks=INTERPRETED_SLOWLY) for values in ("normal", "few", "equal", "steps")),
    ],
)
def test_selection(implementation, values, ratio):
    """All entries that reach the sampled bound are sent, or the k largest if more than k reach it. Both cases occur
    among these seeds."""
    config, numel = DGC(ratio=ratio, momentum=0.0), 9000
    grad = {
        "normal": torch.randn(numel),
        "few": torch.where(torch.rand(numel) < 0.001, torch.randn(numel), 0.0),
        "equal": torch.full((numel,), -2.0),
        "steps": torch.randint(-4, 5, (numel,)).float(),
    }[values]
    keys, k, trimmed = keys_of(grad), config.capacity(numel), []
    for seed in range(6):
        bound = max(1, kth_largest(keys[sample_positions(numel, seed, 0)], sample_rank(k, numel)))
        passing = int((keys >= bound).sum())
        trimmed.append(passing > k)
        payload, _ = encode(implementation, config, grad, zero_residual(config, numel), seed=seed)
        sent = decode_one(config, payload, numel) != 0
        assert int(sent.sum()) == min(passing, k)
        if passing <= k:
            assert torch.equal(sent, keys >= bound)
        else:
            largest = keys.sort(descending=True, stable=True).indices[:k]
            assert torch.equal(sent.nonzero()[:, 0], largest.sort().values)
    assert any(trimmed) or values == "few"
    assert not all(trimmed) or values in ("equal", "steps")


@IMPLEMENTATIONS
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_sent_first_and_changes_nothing(implementation, value):
    config = DGC(ratio=0.001)
    grad, state = torch.ones(3000), torch.randn(6000)
    grad[2999] = value
    payload, after = encode(implementation, config, grad, state)
    decoded = decode_one(config, payload, 3000)
    assert not torch.isfinite(decoded[2999])
    assert int((decoded != 0).sum()) <= 3
    assert torch.equal(after[[2999, 5999]], state[[2999, 5999]])
    assert torch.isfinite(after).all()


def test_threads_do_not_show():
    config, found = DGC(clip=1.0), []
    grad, state = torch.randn(900_000), torch.randn(1_800_000)
    for threads in (1, 4):
        set_num_threads(threads)
        try:
            found.append(encode(HOST, config, grad, state, chunks=3, seed=5))
        finally:
            set_num_threads(None)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


# -------------------------------------------------------------------- clipping


def norm_after(implementation, config, grad) -> float:
    """The norm of the values that a step adds to a state of zeros, that is, of the clipped gradient."""
    _, state = encode(implementation, config, grad, torch.zeros(2 * grad.numel()))
    payload, _ = encode(implementation, config, grad, torch.zeros(2 * grad.numel()))
    return float((state[grad.numel() :] + decode_one(config, payload, grad.numel())).double().norm())


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(each, marks=INTERPRETED_SLOWLY) for each in (torch.bfloat16, torch.float16))],
)
def test_clip(implementation, dtype):
    """The norm is clipped to ``clip / sqrt(workers)``, and left alone if it is smaller."""
    grad = torch.randn(3000).to(dtype)
    assert norm_after(implementation, DGC(clip=12.0, workers=9), grad) == pytest.approx(4.0, rel=1e-6)
    norm = float(grad.double().norm())
    assert norm_after(implementation, DGC(clip=1000.0), grad) == norm


@IMPLEMENTATIONS
@pytest.mark.parametrize("scale", [1e-37, 1e-30, 1e30, 1e37])
def test_the_norm_neither_overflows_nor_vanishes(implementation, scale):
    grad = torch.randn(1000) * scale
    clip = 0.5 * scale
    assert norm_after(implementation, DGC(clip=clip), grad) == pytest.approx(clip, rel=1e-5)


@IMPLEMENTATIONS
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_norm_that_is_not_finite_clips_nothing(implementation, value):
    """Values that are not finite show as they are, and the others do not become NaN or 0."""
    config = DGC(ratio=1.0, clip=1.0)
    grad = torch.randn(100)
    grad[7] = value
    payload, _ = encode(implementation, config, grad, torch.zeros(200))
    assert_equal(decode_one(config, payload, 100), grad)


def test_factors_agree():
    """The factors of reference and kernel are equal, or neighbours if a rounding is close. No rounding is close here;
    the probability is 2**-17, see ``toolkit/sparsifier/states.py``."""
    for seed, numel in enumerate((1, 1000, 4097, 50_000, 1_500_000)):
        grad = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 10
        want = DGC(clip=0.3).accumulation.factor(grad.double().square().sum())
        assert want < 1
        assert launch_factor(grad, 0.3).item() == want.item()


def test_clipping_is_of_the_unit_not_of_the_chunk():
    config, grad = DGC(clip=3.0, ratio=1.0), torch.randn(1000)
    _, one = encode(HOST, config, grad, torch.zeros(2000))
    whole, one = encode(HOST, config, grad, torch.zeros(2000))
    parts, several = encode(HOST, config, grad, torch.zeros(2000), chunks=3)
    assert chunk_numel(1000, 3) == 336
    assert_equal(decode_one(config, parts, 1000), decode_one(config, whole, 1000))
    assert_equal(one, several)


# -------------------------------------------------------------------- schedule and configuration


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DGC(), {0: 0.01}),
        (DGC(ratio=0.001, warmup_steps=40), {0: 0.25, 10: 0.0625, 20: 0.015625, 30: 0.004, 40: 0.001}),
        (DGC(ratio=0.001, warmup_steps=6), {0: 0.25, 2: 0.0625, 3: 0.015625, 5: 0.004, 6: 0.001}),
        (DGC(ratio=0.001, warmup_steps=2), {0: 0.25, 1: 0.015625, 2: 0.001}),
        (DGC(ratio=0.001, warmup_steps=1), {0: 0.25, 1: 0.001}),
        (DGC(ratio=0.1, warmup_steps=8), {0: 0.25, 2: 0.1}),
        (DGC(ratio=0.5, warmup_steps=8), {0: 0.5}),
    ],
)
def test_schedule(config, expected):
    assert {first: method.ratio for first, method in config.schedule} == expected
    for first, method in config.schedule:
        assert config.at_step(first) == method
        assert method.traits.states == config.traits.states
        assert (method.momentum, method.clip) == (config.momentum, config.clip)
    assert config.at_step(10**9).ratio == config.ratio


def test_other_compressors_do_not_change():
    from gckernels import TopK

    compressor = TopK()
    assert compressor.schedule == ((0, compressor),)
    assert compressor.at_step(5) is compressor is compressor.shard_compressor


@pytest.mark.parametrize("config", [DGC(), DGC(nesterov=True, clip=3.0, workers=4, warmup_steps=5, ratio=0.02)])
def test_a_shard_is_sparsified_plainly(config):
    plain = config.shard_compressor
    assert plain == DGC(ratio=config.ratio, momentum=0.0)
    assert plain.traits == Traits(needs_feedback=True, stochastic=True)
    assert plain.payload_nbytes(12_345) == config.payload_nbytes(12_345)
    assert plain.shard_compressor == plain


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("momentum", value) for value in (1.0, -0.1, math.nan, 1, None)),
        *(("clip", value) for value in (0.0, -1.0, math.nan, math.inf, 3)),
        *(("workers", value) for value in (0, -1, 1.0, True)),
        *(("warmup_steps", value) for value in (-1, 1.0, None, False)),
        *(("nesterov", value) for value in (1, None)),
    ],
)
def test_fields_are_checked(field, value):
    with pytest.raises(ValueError, match=f"DGC: {field}"):
        DGC(**{field: value})


def test_nesterov_needs_momentum():
    with pytest.raises(ValueError, match="nesterov"):
        DGC(momentum=0.0, nesterov=True)
