"""Tests that kernels are compiled before the GPU targets launch them."""

from __future__ import annotations

import importlib

import pytest

from bench.gpu import compilation
from bench.lib.budget import Budget
from gckernels.toolkit.kernels.launch import Launch
from processes import output_of


@pytest.mark.slow
def test_the_kernels_of_all_parts_are_compiled_first(monkeypatch):
    launches: list[Launch] = []
    monkeypatch.setattr(compilation, "compile_all", lambda recorded, budget: launches.extend(recorded))
    importlib.import_module("bench.gpu.bench").compile_kernels(Budget(1))
    kernels = {launch.kernel.fn.__name__ for launch in launches}
    assert kernels >= {"_encode_kernel", "_encode_batch_kernel", "_decode_batch_kernel"}  # one by one and bound
    assert kernels >= {"_left_kernel", "_reconstruct_kernel"}  # PowerSGD's


def test_launchers_of_older_releases_are_compiled_with_the_kernels(monkeypatch):
    driver, made = compilation.driver, []
    monkeypatch.setattr(driver, "CudaLauncher", lambda kernel, metadata: made.append(kernel) or 1 / 0)
    monkeypatch.setattr(driver, "make_launcher", None, raising=False)
    compilation._compile_launcher("kernel", None)
    assert made == ["kernel"]
    monkeypatch.delattr(driver, "make_launcher")
    compilation._compile_launcher("another", None)
    assert made == ["kernel"]


RECORDED = """
from bench.gpu.compilation import distinct
from bench.kernels.gpu_kernels import bandwidth_cases

launches = [launch for case in bandwidth_cases() for launch in case.launches()]
assert len(launches) > len(distinct(launches, 90)) > 100
"""

LOOKED_FOR = """
from harness import fake_driver
import torch
import triton.compiler
from bench.gpu import bits, compilation

def key(source, options):
    return source.hash(), triton.compiler.make_backend(fake_driver.TARGET).parse_options(dict(options)).hash()

looked_for, compiled = set(), set()
fake_driver.install()
compile_nothing = triton.compiler.compile

def compile(src, target, options, **rest):
    looked_for.add(key(src, options))
    return compile_nothing(src, target, options, **rest)

triton.compiler.compile = compile
for spec in ("BlockQuant(bits=4)", "EFSignSGD(block=None)", "TopK", "Cast16", "PowerSGD(rank=4)"):
    for task in ((spec, True), (spec, False)):
        for numel in (1, 1500):
            for launch in compilation.distinct(bits.launches(task, numel, torch.float32), 90):
                compiled.add(key(compilation.source(launch, 90), launch.options))
            for _, check in bits.compare(task, numel, torch.float32, torch.device("cpu"), seed=0):
                try:
                    check()
                except AssertionError:
                    pass  # nothing has run
assert compiled == looked_for, (len(compiled), len(looked_for), len(compiled & looked_for))
assert len(compiled) > 20
"""


FOR_AMD = """
import torch
from gckernels.toolkit.kernels import launch as launching

launching.BACKEND = "hip"
from bench.gpu import compilation
from gckernels import Cast16
from harness.machine_code.launches import calls_of_one

calls = calls_of_one(Cast16(), torch.float32, 1500, 1, 1, accumulate=False)
compilation._launches = compilation.distinct([launch for _, _, each in calls for launch in each], "gfx942")
assert [compilation._compile((index, "gfx942"))["error"] for index in range(2)] == ["", ""]
"""

WITHOUT_A_GPU = """
from bench.gpu import compilation
from bench.lib.budget import Budget

if __name__ == "__main__":
    result = compilation.compile_all([], Budget(60))
    assert not result.ok and result.lines[0].startswith("nothing is compiled: Triton finds no GPU"), result
"""


def test_without_a_gpu_nothing_is_compiled(tmp_path):
    script = tmp_path / "script.py"  # a process is started from a file
    script.write_text(WITHOUT_A_GPU)
    output_of(script, timeout_s=200, CUDA_VISIBLE_DEVICES="", HIP_VISIBLE_DEVICES="")


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(RECORDED, id="cases of a GPU", marks=pytest.mark.slow),
        pytest.param(LOOKED_FOR, id="what launches look for"),
        pytest.param(FOR_AMD, id="for AMD", marks=pytest.mark.slow),
    ],
)
def test_kernels_are_compiled_before_they_are_launched(script):
    """Runs in a process that does not interpret kernels."""
    output_of("-c", script, timeout_s=200)
