"""Orthonormal bases of PowerSGD's factors: the specification against QR in fp64, C and kernels against both."""

from __future__ import annotations

import pytest
import torch

import gckernels
from gckernels.ops.powersgd import host, kernels, reference
from gckernels.toolkit.kernels import launch as launching
from gckernels.toolkit.kernels.launch import record_launches
from helpers import HOST_PARAM, INTERPRETED_SLOWLY, KERNEL, KERNEL_PARAM, number
from low_rank_stages import HOST, STAGES

U = 2.0**-24  # the largest relative error of one rounding in fp32


@pytest.fixture(params=[HOST_PARAM, KERNEL_PARAM])
def place(request):
    return STAGES[request.param.name], request.param.device


def _to(device, tensors):
    return [tensor.to(device, copy=True) for tensor in tensors]


def _orthonormal(factor):
    gram = factor.double() @ factor.double().T
    used = gram.diagonal() > 0.5
    # the only error is the rounding of both vectors' entries to fp32
    assert ((gram - torch.diag(used.double())).abs() <= 4 * U).all(), gram
    return used.tolist()


FACTORS = {
    "random": lambda: torch.randn(4, 50),
    "one": lambda: torch.randn(1, 1),
    "square": lambda: torch.randn(6, 6),
    "tiny": lambda: torch.randn(3, 2000) * 1e-38,
    "huge": lambda: torch.randn(3, 40) * 1e37,
    "scales": lambda: torch.randn(4, 100) * torch.tensor([1e20, 1e-20, 1.0, 1e10])[:, None],
    "rank 32": lambda: torch.randn(32, 130),
    "nearly dependent": lambda: torch.randn(1, 90) + 1e-3 * torch.randn(5, 90),
}


@pytest.mark.parametrize("with_seeds", [pytest.param(False, marks=INTERPRETED_SLOWLY), True])
def test_bases(place, with_seeds):
    ops, device = place
    torch.manual_seed(1)
    given = [make() for make in FACTORS.values()]
    got = _to(device, given)
    ops.orthogonalise(got, list(range(len(given))) if with_seeds else None)
    for name, basis, factor in zip(FACTORS, got, given, strict=True):
        basis = basis.cpu()
        assert all(_orthonormal(basis)), name
        want = reference.orthogonalise(factor, None)
        # Sums in fp64 differ by about 1e-16 times the condition, here below 1e5: at most one rounding to fp32.
        torch.testing.assert_close(basis, want, rtol=2.0**-22, atol=2.0**-30, msg=name)


def _deficient():
    torch.manual_seed(2)
    factor = torch.randn(6, 75)
    factor[1] = 0
    factor[3] = 2 * factor[0] - factor[2]
    factor[4] = factor[0]
    return factor


def test_dependent_columns_become_zero(place):
    ops, device = place
    given = [_deficient(), torch.zeros(2, 9), torch.ones(3, 30)]
    got = _to(device, given)
    ops.orthogonalise(got, None)
    assert [_orthonormal(basis.cpu()) for basis in got] == [
        [True, False, True, False, False, True],
        [False, False],
        [True, False, False],
    ]
    for basis, factor in zip(got, given, strict=True):
        torch.testing.assert_close(basis.cpu(), reference.orthogonalise(factor, None), rtol=2.0**-22, atol=2.0**-30)


def test_dependent_columns_become_random(place):
    ops, device = place
    damaged = torch.randn(3, 40)
    damaged[1, 7], damaged[2, 3] = torch.nan, torch.inf
    given = [_deficient(), torch.zeros(2, 9), torch.zeros(4, 4), damaged]
    seeds = [2**62 + 12345, 7, 8, 9]
    got = _to(device, given)
    ops.orthogonalise(got, seeds)
    for basis, factor, seed in zip(got, given, seeds, strict=True):
        assert all(_orthonormal(basis.cpu()))
        torch.testing.assert_close(basis.cpu(), reference.orthogonalise(factor, seed), rtol=2.0**-20, atol=2.0**-28)
        other = [factor.to(device)]
        ops.orthogonalise(other, [seed + 1])
        assert not torch.equal(other[0], basis)


def test_what_is_added_to_seeds_is_added_modulo_2_to_the_63(place):
    ops, device = place
    first, second = ([torch.zeros(2, 40, device=device), torch.zeros(3, 9, device=device)] for _ in range(2))
    ops.orthogonalise(first, [5, 2**63 - 1], 7)
    ops.orthogonalise(second, [12, 6])
    assert all(map(torch.equal, first, second))


def test_seeds_that_stay_the_same_are_copied_to_the_device_once():
    factors = [torch.zeros(2, 40)]
    with record_launches() as recorded:
        for step in range(3):
            kernels.orthogonalise(factors, [7], number(step))
    seeded = [launch for launch in recorded if "seeds_ptr" in launch.names]
    assert len({id(launch.args[launch.names.index("seeds_ptr")]) for launch in seeded}) == 1
    assert {int(launch.args[launch.names.index("added_ptr")]) for launch in seeded} == {0, 1, 2}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_factor_that_is_not_finite_is_nan_throughout(place, value):
    ops, device = place
    given = [torch.randn(3, 50), torch.randn(2, 2000)]
    given[1][0, 1500] = value
    got = _to(device, given)
    ops.orthogonalise(got, None)
    assert all(_orthonormal(got[0].cpu())) and got[1].isnan().all()


# -------------------------------------------------------------------- columns that are close to each other


def _mixed(singular_values):
    """Columns, fp32, with the given singular values, each a mixture of all singular vectors."""
    count = len(singular_values)
    vectors, mixture = (torch.linalg.qr(torch.randn(n, count, dtype=torch.float64))[0] for n in (400, count))
    return (vectors * singular_values @ mixture).float().T.contiguous()


def _chained(closeness):
    """Columns each of which is close to those before it, as the factor of Kahan's matrix."""
    triangle = torch.full((6, 6), 0.5, dtype=torch.float64).triu()
    triangle.diagonal().copy_(torch.tensor([1.0] + 5 * [closeness]))
    return (torch.linalg.qr(torch.randn(60, 6, dtype=torch.float64))[0] @ triangle).float().T.contiguous()


CLOSE = {
    "well conditioned": lambda: torch.randn(8, 300),
    "graded to 2**-10": lambda: _mixed(torch.logspace(0, -10, 32, 2, dtype=torch.float64)),
    "graded to 2**-18": lambda: _mixed(torch.logspace(0, -18, 16, 2, dtype=torch.float64)),
    "Hilbert": lambda: 1 / (torch.arange(6)[:, None] + torch.arange(40)[None] + 1.0),
    "chained": lambda: _chained(2.0**-12),
    "huge": lambda: _mixed(1e37 * torch.logspace(0, -16, 8, 2, dtype=torch.float64)),
    "tiny": lambda: _mixed(1e-30 * torch.logspace(0, -16, 8, 2, dtype=torch.float64)),
}


@pytest.mark.parametrize("name", CLOSE)
def test_bases_are_those_of_a_qr_decomposition(name):
    torch.manual_seed(3)
    factor = CLOSE[name]()
    q, r = torch.linalg.qr(factor.double().T)
    want = (q * r.diagonal().sign()).T
    # The condition is at most 2**21. Of fp64's 2**-53, this leaves less than the rounding of elements below 1 to fp32.
    for basis in (reference.orthogonalise(factor, None), _of_host(factor)):
        assert all(_orthonormal(basis)) and (basis.double() - want).abs().max() <= 2 * U


def _of_host(factor, seed=None):
    basis = factor.clone()
    HOST.orthogonalise([basis], None if seed is None else [seed])
    return basis


def test_close_columns_take_more_rounds(place):
    ops, device = place
    torch.manual_seed(4)
    given = [CLOSE["chained"](), CLOSE["Hilbert"](), torch.randn(2, 30)]
    got = _to(device, given)
    ops.orthogonalise(got, None)
    for basis, factor in zip(got, given, strict=True):
        assert all(_orthonormal(basis.cpu()))
        torch.testing.assert_close(basis.cpu(), reference.orthogonalise(factor, None), rtol=0, atol=4 * U)


def test_what_stays_too_close_becomes_zero(monkeypatch):
    monkeypatch.setattr(reference, "ROUNDS", 1)
    basis = reference.orthogonalise(_chained(2.0**-12), None)
    assert _orthonormal(basis) == [True, False, True, True, True, True]


@pytest.mark.parametrize("seed", [None, 5])
def test_threads_share_a_long_factor(seed):
    torch.manual_seed(5)
    factor = torch.cat([_mixed_long(), torch.zeros(2, 20_000)])
    bases = []
    try:
        for threads in (1, 3):
            gckernels.set_num_threads(threads)
            bases.append(_of_host(factor, seed))
    finally:
        gckernels.set_num_threads(None)
    assert torch.equal(*bases)
    assert _orthonormal(bases[0]) == 8 * [True] + 2 * [seed is not None]


def _mixed_long():
    columns = torch.randn(8, 20_000)
    columns[3] = columns[2] + 2.0**-14 * columns[3]
    return columns


def test_without_a_compiler_bases_are_those_of_the_specification(monkeypatch):
    monkeypatch.setattr(host, "build", lambda: None)
    test_bases((HOST, "cpu"), True)
    test_dependent_columns_become_zero((HOST, "cpu"))
    test_dependent_columns_become_random((HOST, "cpu"))
    test_what_is_added_to_seeds_is_added_modulo_2_to_the_63((HOST, "cpu"))


def test_on_amd_nothing_is_exchanged_through_memory(monkeypatch):
    monkeypatch.setattr(launching, "BACKEND", "hip")
    factors = [torch.randn(3, 100), torch.randn(2, 9)]
    with record_launches() as recorded:
        kernels.orthogonalise(factors, [1, 2])
        kernels.keep(factors, factors)
    assert len(recorded) == 3 * reference.ROUNDS + 2 and not any("WAITS" in launch.constexprs for launch in recorded)


@pytest.mark.skipif(KERNEL.device != "cpu", reason="pretends to be another GPU, which only the interpreter can")
def test_on_amd_rounds_are_launches(monkeypatch):
    monkeypatch.setattr(launching, "BACKEND", "hip")
    ops = STAGES["kernel"], "cpu"
    test_close_columns_take_more_rounds(ops)
    test_dependent_columns_become_zero(ops)
    test_dependent_columns_become_random(ops)
