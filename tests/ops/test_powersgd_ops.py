"""The stages of PowerSGD: C and kernels equal the specification, which is tested for its mathematical properties."""

from __future__ import annotations

import itertools
import platform
from types import SimpleNamespace

import pytest
import torch

import gckernels
from gckernels import Identity, PowerSGD
from gckernels.ops.powersgd import host as powersgd_host
from gckernels.ops.powersgd import ops as powersgd_ops
from gckernels.ops.powersgd import reference
from gckernels.toolkit.host import compilers
from helpers import HOST_PARAM, INTERPRETED_SLOWLY, KERNEL_PARAM
from host_builds import PROCESSORS, compiled_for
from low_rank_stages import HOST, STAGES
from process_settings import SETTINGS as PROCESS_SETTINGS

U = 2.0**-24  # the largest relative error of one rounding in fp32
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((40, 33, 4), (1, 1, 1), (70, 300, 5), (33, 2, 2), (130, 64, 1), (1100, 40, 3))
"""The rows, columns and rank of each matrix of one call."""
LARGE = ((300, 700, 32), (64, 513, 17))


@pytest.fixture(params=[HOST_PARAM, KERNEL_PARAM])
def place(request):
    return STAGES[request.param.name], request.param.device


INTERPRETED = ((SHAPES, torch.float32, True), (SHAPES, torch.bfloat16, False), (LARGE, torch.float16, True))
SETTINGS = pytest.mark.parametrize(
    ("shapes", "dtype", "with_residual"),
    [
        pytest.param(*setting, id=f"{name}-{setting[1]}-{setting[2]}", marks=[] if quick else INTERPRETED_SLOWLY)
        for name, shapes in (("small", SHAPES), ("large", LARGE))
        for setting in itertools.product([shapes], DTYPES, [True, False])
        for quick in [setting in INTERPRETED]
    ],
)


def _matrices(shapes, dtype, with_residual=True):
    grads = [torch.randn(rows * cols).to(dtype) for rows, cols, _ in shapes]
    residuals = [torch.randn(rows * cols) for rows, cols, _ in shapes] if with_residual else []
    left = [torch.randn(rank, rows) for rows, _, rank in shapes]
    right = [torch.randn(rank, cols) for _, cols, rank in shapes]
    return grads, residuals, left, right


def _to(device, *lists):
    return [[tensor.to(device, copy=True) for tensor in each] for each in lists]


def _matrix(grads, residuals, index, rows):
    return reference.matrix(grads[index], residuals[index] if residuals else None, rows)


def _assert_within(got, want, bound):
    excess = ((got.cpu().double() - want).abs() - bound).max()
    assert excess <= 0, excess


@SETTINGS
def test_products(place, shapes, dtype, with_residual):
    """Products are close to fp64: an entry is a sum of n terms, each rounded at most n + 1 times."""
    ops, device = place
    grads, residuals, left, right = _matrices(shapes, dtype, with_residual)
    g, r, p, q = _to(device, grads, residuals, left, right)
    ops.left(g, r, q, p, 0.25)
    for index, (rows, cols, _) in enumerate(shapes):
        values = _matrix(grads, residuals, index, rows).double()
        want = reference.left_of(values, right[index].double(), 0.25)
        size = reference.left_of(values.abs(), right[index].double().abs(), 0.25)
        _assert_within(p[index], want, (cols + 1) * U * size)
    g, r, p, q = _to(device, grads, residuals, left, right)
    ops.right(g, r, p, q, 0.25)
    for index, (rows, _, _) in enumerate(shapes):
        values = _matrix(grads, residuals, index, rows).double()
        want = reference.right_of(values, left[index].double(), 0.25)
        size = reference.right_of(values.abs(), left[index].double().abs(), 0.25)
        _assert_within(q[index], want, (rows + 1) * U * size)
    for got, given in zip((*g, *r, *p), (*grads, *residuals, *left), strict=True):
        assert torch.equal(got.cpu(), given), "what is only read"


@SETTINGS
def test_reconstruct(place, shapes, dtype, with_residual):
    ops, device = place
    grads, residuals, left, right = _matrices(shapes, dtype, with_residual)
    g, r, p, q = _to(device, grads, residuals, left, right)
    ops.reconstruct(p, q, g, r)
    for index, (rows, _, rank) in enumerate(shapes):
        want = (left[index].double().T @ right[index].double()).view(-1)
        size = (left[index].double().abs().T @ right[index].double().abs()).view(-1)
        bound = (rank + 1) * U * size
        rounding = 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps / 2 * (want.abs() + bound)
        _assert_within(g[index], want, bound + rounding + torch.finfo(dtype).tiny)
        if with_residual:  # exactly the error of the rounded values
            values = _matrix(grads, residuals, index, rows).view(-1)
            assert torch.equal(r[index].cpu(), values - g[index].cpu().float())


def test_residuals_take_nothing_that_is_not_finite(place):
    ops, device = place
    grads, residuals, left, right = _matrices(((8, 70, 2),), torch.float32)
    grads[0][5], grads[0][100] = torch.inf, torch.nan
    left[0][1, 3] = torch.nan
    g, r, p, q = _to(device, grads, residuals, left, right)
    ops.reconstruct(p, q, g, r)
    changed = (r[0].cpu() != residuals[0]).view(8, 70)
    expected = torch.ones(8, 70, dtype=torch.bool)
    expected[0, 5] = expected[1, 30] = expected[3] = False
    assert torch.equal(changed, expected)
    assert g[0].view(8, 70)[3].isnan().all() and g[0].view(8, 70)[0].isfinite().all()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("setting", PROCESS_SETTINGS)
def test_settings_of_the_process_change_no_bit(setting, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr(powersgd_host, "build", lambda: None)
    given = _matrices(SHAPES, torch.bfloat16)
    seeds = list(range(len(SHAPES)))

    def stages(grads, residuals, left, right) -> None:
        HOST.orthogonalise(right, seeds, 5)
        HOST.left(grads, residuals, right, left, 0.25)
        HOST.orthogonalise(left, None)
        HOST.right(grads, residuals, left, right, 0.25)
        HOST.keep(right, left[:0])
        HOST.reconstruct(left, right, grads, residuals)

    want, got = _to("cpu", *given), _to("cpu", *given)
    stages(*want)
    with PROCESS_SETTINGS[setting]():
        stages(*got)
    for one, other in zip(itertools.chain(*got), itertools.chain(*want), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("rows", "cols"), [(0, 5), (5, 0)])
def test_products_of_empty_matrices(rows, cols):
    grads, residuals, left, right = _matrices(((rows, cols, 2),), torch.float32)
    HOST.left(grads, residuals, right, left, 1.0)
    assert rows == 0 or not left[0].any()
    HOST.right(grads, residuals, left, right, 1.0)
    assert cols == 0 or not right[0].any()
    HOST.reconstruct(left, right, grads, residuals)
    HOST.orthogonalise(left, None)


def test_keep(place):
    ops, device = place
    means = [torch.randn(2, 700), torch.zeros(3, 5), torch.randn(2, 700), torch.randn(1, 4)]
    means[2][1, 600], means[3][0, 0] = torch.inf, torch.nan
    factors = [torch.randn_like(mean) for mean in means]
    m, f = _to(device, means, factors)
    ops.keep(m, f)
    assert torch.equal(f[0].cpu(), means[0]) and torch.equal(m[0].cpu(), means[0])
    for index in (1, 2, 3):
        assert torch.equal(f[index].cpu(), factors[index])
    assert not m[1].any() and m[2].isnan().all() and m[3].isnan().all()
    (m,) = _to(device, means)
    ops.keep(m, [])
    assert torch.equal(m[0].cpu(), means[0]) and m[2].isnan().all()


# -------------------------------------------------------------------- the host path


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_compiler_the_specification_runs(monkeypatch, dtype):
    monkeypatch.setattr(powersgd_host, "build", lambda: None)
    ops = HOST
    test_products((ops, "cpu"), SHAPES, dtype, True)
    test_reconstruct((ops, "cpu"), SHAPES, dtype, True)
    test_keep((ops, "cpu"))


def test_results_depend_on_neither_threads_nor_neighbours():
    shapes = ((300, 700, 8), (64, 513, 17), (5000, 70, 4))
    grads, residuals, left, right = _matrices(shapes, torch.float32)

    def results(grads, residuals, left, right):
        g, r, p, q = _to("cpu", grads, residuals, left, right)
        HOST.left(g, r, q, p, 0.5)
        HOST.right(g, r, p, q, 0.5)
        HOST.orthogonalise(p, None)
        HOST.reconstruct(p, q, g, r)
        return [*zip(g, r, p, q, strict=True)]

    want = results(grads, residuals, left, right)
    try:
        for threads in (1, 3, 8):
            gckernels.set_num_threads(threads)
            got = results(grads, residuals, left, right)
            assert all(torch.equal(a, b) for x, y in zip(got, want, strict=True) for a, b in zip(x, y, strict=True))
    finally:
        gckernels.set_num_threads(None)
    for index in range(len(shapes)):
        (alone,) = results(*([each[index]] for each in (grads, residuals, left, right)))
        assert all(torch.equal(a, b) for a, b in zip(alone, want[index], strict=True))


@pytest.mark.parametrize("processor", PROCESSORS.get(platform.machine(), ()))
def test_what_ranks_compute_for_themselves_depends_on_no_processor(processor):
    """Bases and products of factors have the same bits with other vectors, and without an instruction that multiplies
    and adds."""
    shapes = ((300, 700, 8), (64, 513, 17), (130, 64, 1), (700, 300, 32))
    given = _matrices(shapes, torch.bfloat16)

    def results():
        grads, residuals, left, right = _to("cpu", *given)
        HOST.orthogonalise(left, None)
        HOST.orthogonalise(right, [1, 2, 3, 4])
        HOST.reconstruct(left, right, grads, residuals)
        return [*grads, *residuals, *left, *right]

    want = results()
    with compiled_for(processor):
        assert all(torch.equal(got, each) for got, each in zip(results(), want, strict=True))


def test_ranks_can_compare_how_they_multiply_matrices(monkeypatch):
    """Nothing is to compare if all run the C program, which has the same bits everywhere."""
    method, cpu, gpu = PowerSGD(), torch.device("cpu"), torch.device("cuda")
    assert method.arithmetic(cpu) == ""
    monkeypatch.setattr(powersgd_host, "build", lambda: None)
    assert "eager torch" in method.arithmetic(cpu)
    found = set()
    for capability in ((8, 0), (9, 0)):
        properties = SimpleNamespace(major=capability[0], minor=capability[1], gcnArchName="gfx90a:sramecc+:xnack-")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, of=properties: of)
        found.add(method.arithmetic(gpu))
    monkeypatch.setattr(torch.version, "hip", "7.0")  # whose gfx90a says 9.0, as an H100 does
    found.add(method.arithmetic(gpu))
    assert len(found) == 3 and {each.partition(" on ")[2] for each in found} == {
        "compute capability 8.0 of NVIDIA",
        "compute capability 9.0 of NVIDIA",
        "gfx90a of AMD",
    }


def test_the_host_path_is_compiled():
    assert compilers.compiler() is None or powersgd_host.build() is not None


# -------------------------------------------------------------------- the example, the configuration, the ops


def test_worked_example():
    grad, residual = torch.tensor([3.0, 0.0, 4.0, 0.0]), torch.zeros(4)
    right, left = torch.tensor([[1.0, 0.0]]), torch.empty(1, 2)
    powersgd_ops.left([grad], [residual], [right], [left])
    assert left.view(torch.uint8).flatten().tolist() == [0, 0, 0x40, 0x40, 0, 0, 0x80, 0x40]
    powersgd_ops.orthogonalise([left])
    assert torch.equal(left, torch.tensor([[0.6, 0.8]]))
    powersgd_ops.right([grad], [residual], [left], [right])
    assert torch.equal(right, torch.tensor([[5.0, 0.0]]))
    powersgd_ops.reconstruct([left], [right], [grad], [residual])
    assert torch.equal(grad, torch.tensor([3.0, 0.0, 4.0, 0.0])) and not residual.any()


def test_configuration():
    method = gckernels.from_spec("PowerSGD(rank=2, one_sided=True)")
    assert method == PowerSGD(rank=2, one_sided=True) == gckernels.from_json(method.to_json())
    assert (PowerSGD().rounds, method.rounds) == (2, 1)
    assert method.fit((8, 3, 2)) == PowerSGD(rank=2, one_sided=True, rows=8)
    assert method.fit((4, 4)) == method.fit((9,)) == method.fit(()) == method.fit((0, 7)) == Identity()
    assert "PowerSGD" in gckernels.COMPRESSORS and "PowerSGD" not in gckernels.CODECS


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rank": 0}, "rank must be an integer from 1 to 32, got 0"),
        ({"rank": 33}, "rank"),
        ({"rank": 2.0}, "rank"),
        ({"rank": True}, "rank"),
        ({"warm_start": 1}, "warm_start"),
        ({"one_sided": None}, "one_sided"),
        ({"rows": 0}, "rows"),
        ({"rows": 2.0}, "rows"),
        ({"one_sided": True, "warm_start": False}, "one_sided takes warm_start"),
        ({"columns": 3}, "unknown field 'columns'"),
    ],
)
def test_refused_configurations(fields, message):
    with pytest.raises(ValueError, match=f"PowerSGD.*{message}"):
        gckernels.from_json({"name": "PowerSGD"} | fields)


def test_ops():
    grads, residuals, left, right = _matrices(((12, 9, 2), (7, 30, 3)), torch.float32)
    ops = torch.ops.gckernels
    for op, arguments in (
        (ops.powersgd_orthogonalise, (left, None)),
        (ops.powersgd_orthogonalise, (left, [1, 2])),
        (ops.powersgd_left, (grads, residuals, right, left, 0.5)),
        (ops.powersgd_right, (grads, [], left, right)),
        (ops.powersgd_reconstruct, (left, right, grads, residuals)),
        (ops.powersgd_keep, (right, [each.clone() for each in right])),
        (ops.powersgd_keep, (right, [])),
    ):
        torch.library.opcheck(op.default, arguments)


def _spoil(**changed):
    grads, residuals, left, right = _matrices(((12, 9, 2), (7, 30, 3)), torch.float32)
    given = {"grads": grads, "residuals": residuals, "left": left, "right": right}
    for argument, change in changed.items():
        given[argument] = change(given[argument])
    return given


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"grads": lambda t: [t[0].double(), t[1]]}, TypeError, "grads must all be of one of the dtypes"),
        ({"grads": lambda t: [t[0], t[1].half()]}, TypeError, "grads must all be of one of the dtypes"),
        ({"grads": lambda t: [t[0][:-1], t[1]]}, ValueError, r"grads\[0\] must be a contiguous vector of 108 elements"),
        ({"grads": lambda t: [t[0].view(12, 9), t[1]]}, ValueError, r"grads\[0\] must be a contiguous vector"),
        ({"grads": lambda t: t[:1]}, ValueError, "as many of each, got 1 grads, 2 left, 2 right, 2 residuals"),
        ({"residuals": lambda t: t[:1]}, ValueError, "as many of each"),
        ({"residuals": lambda t: [t[0].half(), t[1]]}, TypeError, "residuals must be torch.float32"),
        ({"residuals": lambda t: [t[1], t[0]]}, ValueError, r"residuals\[0\] must be a contiguous vector"),
        ({"left": lambda t: [t[0].double(), t[1]]}, TypeError, "left must be torch.float32"),
        ({"left": lambda t: [t[0].T, t[1]]}, ValueError, r"left must be contiguous \[rank, length\]"),
        ({"right": lambda t: [t[0][:1], t[1]]}, ValueError, r"left\[0\] is of rank 2, right\[0\] of rank 1"),
        ({"right": lambda t: [torch.zeros(33, 9), t[1]]}, ValueError, "right must be of rank 1 to 32, got 33"),
    ],
)
def test_bad_arguments(changed, error, message):
    given = _spoil(**changed)
    before = [tensor.clone() for each in given.values() for tensor in each]
    for call in (
        lambda: powersgd_ops.left(given["grads"], given["residuals"], given["right"], given["left"]),
        lambda: powersgd_ops.right(given["grads"], given["residuals"], given["left"], given["right"]),
        lambda: powersgd_ops.reconstruct(given["left"], given["right"], given["grads"], given["residuals"]),
    ):
        with pytest.raises(error, match=message):
            call()
    after = [tensor for each in given.values() for tensor in each]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_bound_stages_repeat_the_ops():
    shapes = ((12, 9, 2), (7, 30, 3))
    first, bound = (_matrices(shapes, torch.float32) for _ in range(2))
    (grads, residuals, left, right), kept = bound, [torch.zeros(rank, cols) for _, cols, rank in shapes]
    added = torch.zeros(1, dtype=torch.int64, device=right[0].device)
    begin = powersgd_ops.bind_orthogonalise(right, [1, 2], added)
    works = [
        powersgd_ops.bind_left(grads, residuals, right, left, 0.5),
        powersgd_ops.bind_right(grads, residuals, left, right, 0.5),
        powersgd_ops.bind_keep(right, kept),
        powersgd_ops.bind_reconstruct(left, right, grads, residuals),
    ]
    for step in range(2):
        for mine, given in zip(bound, first, strict=True):
            torch._foreach_copy_(mine, given)
        added.fill_(step)
        begin()
        for work in works:
            work()
        g, r, p, q = _to("cpu", *first)
        powersgd_ops.orthogonalise(q, [1, 2], step)
        powersgd_ops.left(g, r, q, p, 0.5)
        powersgd_ops.right(g, r, p, q, 0.5)
        powersgd_ops.reconstruct(p, q, g, r)
        assert all(map(torch.equal, [*grads, *residuals, *left, *right, *kept], [*g, *r, *p, *q, *q]))
        first = _matrices(shapes, torch.float32)


def test_nothing_is_bound_to_tensors_without_memory():
    grads, residuals, left, right = _to("meta", *_matrices(((12, 9, 2),), torch.float32))
    powersgd_ops.bind_orthogonalise(left, [1])()
    powersgd_ops.bind_left(grads, residuals, right, left)()
    powersgd_ops.bind_keep(right, [])()
    with pytest.raises(ValueError, match="right must be of rank 1 to 32, got 33"):
        powersgd_ops.bind_left(grads, residuals, [torch.zeros(33, 9, device="meta")], left)


def test_bad_arguments_of_bases():
    with pytest.raises(ValueError, match="as many of each, got 1 factors, 2 seeds"):
        powersgd_ops.orthogonalise([torch.zeros(2, 3)], [1, 2])
    with pytest.raises(ValueError, match=r"factors must be contiguous \[rank, length\]"):
        powersgd_ops.orthogonalise([torch.zeros(6)])
    with pytest.raises(ValueError, match=r"means\[0\] is \(2, 3\), factors\[0\] \(3, 2\)"):
        powersgd_ops.keep([torch.zeros(2, 3)], [torch.zeros(3, 2)])
