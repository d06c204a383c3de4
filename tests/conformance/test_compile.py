"""Inside functions compiled by ``torch.compile``, compressors break no graph and give the same bits as outside."""

from __future__ import annotations

import functools
import os
import shutil
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch._inductor.config
from configurations import DEFAULTS, ONE_OF_EACH_KIND, parametrize
from torch._dynamo.testing import CompileCounterWithBackend

import gckernels
from gckernels import chunk_numel
from helpers import assert_equal, random_residual

NUMEL, CHUNKS = 5000, 3
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
SLOW = pytest.mark.slow
QUICK = ("BlockFP8", "ChunkTopK", "DGC")
"""A quantiser, a selection in groups, and a sparsifier with two states and a seed."""


@pytest.fixture(autouse=True)
def _compiled_anew():
    """Compile everything again for each test."""
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # warnings about our code are errors, because users would see them ...
        for module in ("torch", "triton"):  # ... but torch's about its own code are not
            warnings.filterwarnings("ignore", module=rf"{module}\b")
        yield
    torch.compiler.reset()


@pytest.fixture
def inductor(monkeypatch):
    """Skip the test if inductor cannot compile for the CPU, and spare inductor its slow parts."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"inductor needs a C++ compiler, and there is no {compiler}")
    # the tests fill new memory, which would be a C++ kernel for every size
    monkeypatch.setattr(torch, "empty", torch._C._VariableFunctions.empty)
    # its process pool, and its trials of the compiler, cost more than these few kernels
    with torch._inductor.config.patch({"compile_threads": 1, "cpp.vec_isa_ok": True}):
        yield


def callers(compressor, front: str) -> SimpleNamespace:
    """The functions ``encode(grad, residual, chunks)``, ``decode(payloads, numel)`` and ``recode(payloads, residual,
    numel)`` of one of three front ends; each returns its result."""
    name, config = compressor.op_name, compressor.config()
    if front == "functions":
        states = compressor.traits.states

        def shaped(residual):
            return residual if residual is None or states == 1 else residual.view(states, -1)

        return SimpleNamespace(
            encode=lambda grad, residual, chunks: gckernels.encode(
                compressor, grad, shaped(residual), chunks=chunks, seed=3
            ),
            decode=lambda payloads, numel: gckernels.decode(compressor, payloads, numel, scale=0.5),
            recode=lambda payloads, residual, numel: gckernels.recode(
                compressor, payloads, residual, numel, scale=0.5, seed=4
            ),
        )

    def encode(grad, residual, chunks):
        nbytes = compressor.payload_nbytes(chunk_numel(grad.numel(), chunks))
        payload = torch.empty(chunks, nbytes, dtype=torch.uint8, device=grad.device)
        if front == "methods":
            compressor.encode(grad, residual, payload, seed=3)
        else:
            getattr(torch.ops.gckernels, f"{name}_encode")(grad, residual, payload, *config, 3)
        return payload if chunks > 1 else payload[0]

    def decode(payloads, numel):
        out = torch.empty(numel, device=payloads.device)
        if front == "methods":
            compressor.decode(payloads, out, 0.5)
        else:
            getattr(torch.ops.gckernels, f"{name}_decode")(payloads, out, *config, 0.5)
        return out

    def recode(payloads, residual, numel):
        payload = torch.empty(compressor.payload_nbytes(numel), dtype=torch.uint8, device=payloads.device)
        if front == "methods":
            compressor.recode(payloads, residual, payload, numel, 0.5, seed=4)
        else:
            getattr(torch.ops.gckernels, f"{name}_recode")(payloads, residual, payload, numel, *config, 0.5, 4)
        return payload

    return SimpleNamespace(encode=encode, decode=decode, recode=recode)


def everything(call: SimpleNamespace):
    """A function that encodes with and without feedback, in one chunk and in several, merges, and encodes the
    result."""

    def run(grad, residual, owned):
        scaled = grad * 2
        numel = grad.numel()
        first = call.encode(scaled, residual, 1)
        second = call.encode(scaled, residual, 1)  # continues with the residual of the first call
        chunks = call.encode(scaled, None, CHUNKS)
        merged = call.decode(torch.stack([first, second]), numel)
        again = call.recode(torch.stack([first, second]), owned, numel)
        return first, second, chunks, merged, again, call.recode(first[None], None, numel), residual * 2

    return run


def given(compressor, numel: int, device: str) -> tuple[torch.Tensor, ...]:
    """A gradient, a residual for encode and a residual for recode."""
    residual, owned = random_residual(compressor, numel), random_residual(compressor.shard_compressor, numel)
    return tuple(tensor.to(device) for tensor in (torch.randn(numel), residual, owned))


def check(run, compiled, *arguments: torch.Tensor) -> None:
    """Assert that both functions return the same and leave the same values in their arguments."""
    inside = tuple(argument.clone() for argument in arguments)
    want, got = run(*arguments), compiled(*inside)
    for one, other in zip((*got, *inside), (*want, *arguments), strict=True):
        assert one.dtype == other.dtype
        assert_equal(one, other)


@pytest.mark.parametrize("front", [pytest.param("functions", marks=SLOW), "methods", pytest.param("ops", marks=SLOW)])
@DEVICES
@parametrize(among=DEFAULTS, quick=QUICK)
def test_ahead_of_time_autograd(compressor, device, front):
    """Functionalisation, with which every backend starts, needs to know which arguments an op changes."""
    run = everything(callers(compressor, front))
    check(run, torch.compile(run, fullgraph=True, backend="aot_eager"), *given(compressor, NUMEL, device))


@pytest.mark.parametrize("front", ["functions", pytest.param("methods", marks=SLOW), pytest.param("ops", marks=SLOW)])
@DEVICES
# inductor compiles C++ for every call, which takes seconds; DGC has two states and a seed
@parametrize(among=ONE_OF_EACH_KIND, quick=("DGC",))
def test_inductor(compressor, device, front, inductor):
    run = everything(callers(compressor, front))
    check(run, torch.compile(run, fullgraph=True), *given(compressor, NUMEL, device))


@pytest.mark.parametrize("front", ["functions", pytest.param("methods", marks=SLOW), pytest.param("ops", marks=SLOW)])
@parametrize(among=DEFAULTS, quick=("DGC",))
def test_sizes_are_dynamic(compressor, front):
    """One compilation serves every size: no size is taken for a constant."""
    run = everything(callers(compressor, front))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(run, fullgraph=True, backend=counter)
    for numel in (NUMEL, 33, 8192, 12_345):
        check(run, lambda *inside: compiled(*_all_dynamic(inside)), *given(compressor, numel, "cpu"))
    assert counter.frame_count == 1


@SLOW
@parametrize(among=DEFAULTS)
def test_sizes_are_dynamic_in_inductor(compressor, inductor):
    run = everything(callers(compressor, "functions"))
    compiled = torch.compile(run, fullgraph=True, dynamic=True)
    for numel in (NUMEL, 8192, 12_345):
        check(run, compiled, *given(compressor, numel, "cpu"))


def _all_dynamic(tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    for tensor in tensors:
        torch._dynamo.mark_dynamic(tensor, 0)
    return tensors


@parametrize(lambda compressor: compressor.traits.stochastic, among=DEFAULTS, quick=("RandomK", "TernGrad"))
def test_seeds_are_dynamic(compressor):
    """A new seed in every step does not cause a new compilation."""
    encode = functools.partial(gckernels.encode, compressor)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(encode, fullgraph=True, backend=counter, dynamic=True)
    grad = torch.randn(NUMEL)
    for seed in range(2, 6):
        assert torch.equal(compiled(grad, seed=seed), encode(grad, seed=seed))
    assert counter.frame_count <= 2


@parametrize(among=DEFAULTS, quick=QUICK)
def test_tensors_of_any_shape(compressor):
    encode, decode = (functools.partial(function, compressor) for function in (gckernels.encode, gckernels.decode))

    def run(grad, residual, out):
        payload = encode(grad, residual, chunks=CHUNKS)
        decode(payload, out=out, chunks=CHUNKS, accumulate=True)
        return payload, decode(payload, grad.shape, chunks=CHUNKS, out_dtype=torch.bfloat16)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    shape, states = (7, 5, 30), compressor.traits.states
    residual = torch.randn(shape if states == 1 else (states, *shape))
    check(run, compiled, torch.randn(shape), residual, torch.randn(shape))
