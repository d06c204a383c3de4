"""The entries that sparsifiers select, and their number."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch

from cases import cases
from gckernels import DGC, GradDrop, MSTopK, Threshold, TopK, set_num_threads
from gckernels.toolkit.sparsifier import Sparsifier
from gckernels.toolkit.sparsifier.keys import MAX_FINITE_KEY, keys_of, kth_largest, sample_positions, sample_rank
from gckernels.toolkit.sparsifier.selection import Exact, Fixed, Leading, Sampled
from helpers import HOST, HOST_PARAM, KERNEL_PARAM, REFERENCE, encode

NUMEL = 200_000
IMPLEMENTATIONS = pytest.mark.parametrize("implementation", [HOST_PARAM, KERNEL_PARAM])


def entries(compressor, payload, size) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``(indices, values)`` of all entries in one payload."""
    indices, values, wrong = compressor.entries.read(payload, size, compressor.capacity(size))
    assert not wrong.any()
    return indices, values


def almost_all_zero(nonzero: int) -> torch.Tensor:
    gradient = torch.zeros(NUMEL)
    gradient[torch.randperm(NUMEL)[:nonzero]] = torch.randn(nonzero)
    return gradient


def one_huge() -> torch.Tensor:
    gradient = torch.randn(NUMEL)
    gradient[NUMEL // 3] = 3e38
    return gradient


ADVERSARIAL = {
    "normal": lambda: torch.randn(NUMEL),
    "all equal": lambda: torch.full((NUMEL,), -0.3),
    "one huge": one_huge,
    "heavy tails": lambda: torch.randn(NUMEL) / torch.rand(NUMEL).clamp(min=1e-7),
    "almost all zeros": lambda: almost_all_zero(3 * NUMEL // 100),
    "fewer nonzero than room": lambda: almost_all_zero(NUMEL // 1000),
    "zeros": lambda: torch.zeros(NUMEL),
    "two values": lambda: torch.where(torch.rand(NUMEL) < 0.002, 10.0, 1.0),
    "ascending": lambda: torch.arange(NUMEL) / NUMEL,
    "denormals": lambda: torch.randn(NUMEL) * 1e-42,
}


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("k", [1, 20, 2000])
def test_bounds_have_the_entries_that_there_is_room_for(k, name):
    """Fewer than k keys are above ``upper``, and at least k reach ``lower``; selections differ in the number
    between."""
    keys = keys_of(ADVERSARIAL[name]())
    between = []
    for selection in (Exact(), Leading(), Sampled(trim=True)):
        lower, upper = selection.bounds(keys, k, 3, 16)
        assert lower <= upper
        assert int((keys > upper).sum()) < k
        between.append(int(((keys >= lower) & (keys <= upper)).sum()))
        if not isinstance(selection, Sampled):
            assert int((keys >= lower).sum()) >= k
    assert between[0] <= between[1]
    for selection in (Sampled(), Fixed(12345)):
        assert selection.bounds(keys, k, 3, 16)[1] == MAX_FINITE_KEY
    assert Sampled(trim=True).bounds(keys, k, 3, 16)[0] >= Sampled().bounds(keys, k, 3, 16)[0]


@cases("name", ADVERSARIAL)
@cases("ratio", [0.001, 0.01, 0.1])
@cases("cls", [TopK, MSTopK, GradDrop])
def test_realised_density(cls, ratio, name):
    """At most k entries are sent: exactly k, or all nonzero values if these are fewer, except for the noise of the
    sample."""
    compressor, gradient = cls(ratio=ratio), ADVERSARIAL[name]()
    payload, _ = encode(HOST, compressor, gradient)
    count = len(entries(compressor, payload[0], NUMEL)[0])
    k = compressor.capacity(NUMEL)
    wanted = min(k, int(gradient.count_nonzero()))
    assert count <= wanted
    if cls is GradDrop:
        # The rank in the sample is k / 100 with a deviation of its root; four deviations are allowed. If nothing
        # remains then, or if the sample holds fewer nonzero values than the rank, a single entry may be sent.
        rank = sample_rank(k, NUMEL)
        wanted = math.floor(wanted * max(0.0, 1 - 4 / math.sqrt(rank)))
    assert count >= wanted


@IMPLEMENTATIONS
@pytest.mark.parametrize("ratio", [0.003, 0.2, 1.0])
def test_topk_is_exact(implementation, ratio):
    compressor, gradient = TopK(ratio=ratio), torch.randn(5000)
    payload, residual = encode(implementation, compressor, gradient, torch.zeros(5000))
    indices, values = entries(compressor, payload[0], 5000)
    want = torch.topk(gradient.abs(), compressor.capacity(5000)).indices.sort().values
    assert torch.equal(indices, want)
    assert torch.equal(values, gradient[want])
    gradient[want] = 0
    assert torch.equal(residual, gradient)


@IMPLEMENTATIONS
@pytest.mark.parametrize("compressor", [TopK(ratio=0.1), MSTopK(ratio=0.1), GradDrop(ratio=0.1)], ids=lambda c: c.name)
def test_ties_go_by_index(implementation, compressor):
    gradient = torch.ones(1000)
    gradient[500] = 2.0
    payload, _ = encode(implementation, compressor, gradient)
    indices, _ = entries(compressor, payload[0], 1000)
    first = range(99) if compressor.name != "GradDrop" else range(100)
    assert indices.tolist() == [*first, *([500] if compressor.name != "GradDrop" else [])]


def test_mstopk_is_right_to_an_eighth():
    compressor, gradient = MSTopK(ratio=0.05), torch.randn(NUMEL)
    payload, residual = encode(HOST, compressor, gradient, torch.zeros(NUMEL))
    _, values = entries(compressor, payload[0], NUMEL)
    assert len(values) == compressor.capacity(NUMEL)
    assert residual.abs().max() <= 1.125 * values.abs().min()


@IMPLEMENTATIONS
@pytest.mark.parametrize("tau", [0.0, 1.5])
def test_threshold_is_exclusive(implementation, tau):
    compressor = Threshold(tau=tau, ratio=1.0)
    gradient = torch.tensor([0.0, -0.0, 1.5, -1.5, 1.5000001, -2.0, 1e-45])
    payload, _ = encode(implementation, compressor, gradient)
    indices, _ = entries(compressor, payload[0], 7)
    assert indices.tolist() == (gradient.abs() > tau).nonzero()[:, 0].tolist()


@IMPLEMENTATIONS
@pytest.mark.parametrize(
    "compressor", [Threshold(tau=0.1, ratio=0.01), GradDrop(), TopK(), MSTopK()], ids=lambda c: c.name
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_sent_first(implementation, compressor, value):
    """This holds even if the value comes last, after enough others to fill the payload."""
    gradient = torch.full((3000,), 1.0)
    gradient[2999] = value
    payload, residual = encode(implementation, compressor, gradient, torch.zeros(3000))
    indices, values = entries(compressor, payload[0], 3000)
    assert indices.tolist() == [*range(29), 2999]
    assert not torch.isfinite(values[-1])
    assert residual[2999] == 0


@dataclass(frozen=True)
class LargestQuarter(Sparsifier):
    """A sparsifier as a user might write it."""

    selection = Leading()

    ratio: float = 0.25
    value_bits: int = 8


@IMPLEMENTATIONS
def test_a_new_sparsifier_chooses_a_selection(implementation):
    compressor, grad, residual = LargestQuarter(), torch.randn(5000), torch.randn(5000)
    payload, kept = encode(implementation, compressor, grad, residual)
    want, want_kept = encode(REFERENCE, compressor, grad, residual)
    assert torch.equal(payload, want)
    assert torch.equal(kept, want_kept)


def test_a_selection_of_another_kind_is_refused():
    @dataclass(frozen=True)
    class Own(LargestQuarter):
        selection = "largest"

    class Without(Sparsifier):
        ratio, value_bits = 0.25, 8

    with pytest.raises(TypeError, match=r"Own: selection must be Exact, Leading, Sampled or Fixed, got 'largest'"):
        Own()
    with pytest.raises(TypeError, match="Without: selection must be Exact, Leading, Sampled or Fixed, got None"):
        Without().__post_init__()


@pytest.mark.parametrize(
    ("ratio", "numel", "k"),
    [(0.01, 0, 0), (0.01, 1, 1), (0.01, 100, 1), (0.01, 101, 2), (0.07, 100, 7), (1.0, 5, 5), (1e-12, 10**6, 1)],
)
def test_capacity(ratio, numel, k):
    assert TopK(ratio=ratio).capacity(numel) == k


@pytest.mark.parametrize("cls", [TopK, MSTopK, GradDrop, Threshold])
@pytest.mark.parametrize("ratio", [0.0, -0.1, 1.5, math.nan, 1, None, "0.1"])
def test_ratio_is_checked(cls, ratio):
    with pytest.raises(ValueError, match=f"{cls.__name__}: ratio"):
        cls(ratio=ratio)


@pytest.mark.parametrize("tau", [-1.0, math.inf, math.nan, 1])
def test_tau_is_checked(tau):
    with pytest.raises(ValueError, match="Threshold: tau"):
        Threshold(tau=tau)


@pytest.mark.parametrize("value_bits", [1, 3, 64, 0, -8, 8.0, True, "8", None])
def test_value_bits_are_checked(value_bits):
    with pytest.raises(ValueError, match="TopK: value_bits must be one of 32, 16, 8, 4, 2, got"):
        TopK(value_bits=value_bits)


@pytest.mark.parametrize("numel", [0, 1, 1023, 1024, 2047, 2048, 5000, 102_400, 250_001])
def test_sample(numel):
    """The sample has the promised size and one position in every row, and moves with the seed and the chunk's
    position."""
    positions = sample_positions(numel, 3, 1000)
    assert len(positions) >= min(numel, 1024)
    assert len(positions) <= max(2048, numel // 100)
    rows = positions // max(1, min(100, numel // 1024))
    assert torch.equal(rows, torch.arange(len(positions)))
    if numel >= 2048:
        assert not torch.equal(positions, sample_positions(numel, 4, 1000))
        assert not torch.equal(positions, sample_positions(numel, 3, 1016))


def test_kth_largest():
    keys = torch.tensor([3, 1, 3, 2], dtype=torch.int32)
    assert [kth_largest(keys, k) for k in (0, 1, 2, 3, 4, 5)] == [0, 3, 3, 2, 1, 0]


@pytest.mark.parametrize("cls", [TopK, MSTopK, GradDrop])
def test_threads_do_not_show(cls):
    grad, residual = torch.randn(900_000), torch.randn(900_000)
    compressor, found = cls(value_bits=4), []
    for threads in (1, 4):
        set_num_threads(threads)
        try:
            found.append(encode(HOST, compressor, grad, residual, chunks=3, seed=5))
        finally:
            set_num_threads(None)
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def misleading() -> torch.Tensor:
    """A gradient whose large elements are those that the host path samples, and too few."""
    rows = torch.arange(0, NUMEL // 64)
    gradient = torch.randn(NUMEL)
    gradient[rows * 64 + ((rows * 0x9E3779B9 & 0xFFFFFFFF) * 64 >> 32)] = 100.0
    gradient[::1001] = torch.nan
    return gradient


@cases("name", [*ADVERSARIAL, "misleading"])
@pytest.mark.parametrize(
    "compressor", [TopK(ratio=0.05), MSTopK(ratio=0.02, value_bits=4), DGC(), Threshold(tau=0.1)], ids=lambda c: c.name
)
def test_a_misleading_sample_changes_nothing(compressor, name):
    """Among these are gradients with too few candidates, and with more than there is room for."""
    gradient = misleading() if name == "misleading" else ADVERSARIAL[name]()
    residual = torch.randn(compressor.traits.states * NUMEL) * gradient.abs().nan_to_num(1.0).amin()
    payload, kept = encode(HOST, compressor, gradient, residual, seed=5)
    want, want_kept = encode(REFERENCE, compressor, gradient, residual, seed=5)
    assert torch.equal(payload, want)
    assert torch.equal(kept, want_kept)


@pytest.mark.parametrize("seed", [2**63 + 3, -(2**63) + 3])
def test_all_bits_of_a_seed_count_on_the_host(seed):
    gradient, compressor = torch.randn(5000), GradDrop()
    payload, _ = encode(HOST, compressor, gradient, seed=seed)
    assert torch.equal(payload, encode(REFERENCE, compressor, gradient, seed=seed)[0])
    assert not torch.equal(payload, encode(HOST, compressor, gradient, seed=3)[0])
