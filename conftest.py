"""Settings of all tests: the interpreter switch, seeds, poisoned memory, hypothesis profiles."""

import gc
import os
import sys
from typing import Any

gc.disable()  # until all tests are imported and collected

# Test processes that share the cores use one thread each; torch reads the variable when it is imported.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

# Kernels run compiled on a machine with a GPU, and in Triton's interpreter on any other. Triton reads the switch when a
# kernel is defined, so it must be set before anything imports Triton.
if not torch.cuda.is_available():
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("Triton was imported before TRITON_INTERPRET could be set")
    os.environ["TRITON_INTERPRET"] = "1"

import hypothesis
import numpy as np
import pytest
import triton

import gckernels
import interpreter
import ranks
from cases import seed_everything
from helpers import KERNEL, POISON_BYTE

# a second conftest.py would have the same module name, by which torch.compile looks up what the functions below use
pytest_plugins = ("bench_runs", "devices", "durations", "host_builds", "lane_threads", "network_namespaces", "sampling")

hypothesis.settings.register_profile("dev", deadline=None, max_examples=30)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=30, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "dev")

interpreter.fix_numpy_indexing()
interpreter.refuse_numbers_as_masks()
interpreter.patch_once_per_launch()
interpreter.make_shapes_once()
interpreter.leave_out_what_has_no_effect()


def pytest_report_header() -> str:
    return f"versions: torch {torch.__version__}, triton {triton.__version__}, numpy {np.__version__}"


def pytest_configure(config: pytest.Config) -> None:
    """Ignore NumPy's warnings of overflows inside the interpreter, and make a failed compilation of the host path fail.

    Kernels are tested with inf and NaN on purpose.
    """
    marker = (
        "interpreted(configurations): configurations whose kernels `make test` interprets, see tests/support/helpers.py"
    )
    config.addinivalue_line("markers", marker)
    for module in ("triton.runtime.interpreter", "numpy._core.fromnumeric"):
        config.addinivalue_line("filterwarnings", rf"ignore:.* encountered in \w+:RuntimeWarning:{module}")
    # tests of the host path must not run the reference instead, unless this machine has no compiler
    fallback = "gckernels. the CPU path runs in eager torch, .* because (?!there is no C compiler)"
    config.addinivalue_line("filterwarnings", f"error:{fallback}")
    if hasattr(config, "workerinput"):
        ranks.use_template(config.workerinput["template"])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let all test processes fork their ranks from one template, which imports while they collect."""
    node.workerinput["template"] = ranks.template_path()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On a machine without a GPU, skip the tests that need one, and mark some interpreted tests as slow.

    A test of a kernel is slow unless its ``interpreted`` marks name its configuration; without such marks, unless the
    configuration is the default one.
    """
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if KERNEL in params.values():
            compressor = params.get("compressor")
            named = [mark.args[0] for mark in item.iter_markers("interpreted")]
            if isinstance(compressor, gckernels.Codec) and not named:
                named = [(type(compressor)(),)]
            if not all(compressor in configurations for configurations in named):
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Exempt what exists before the first test from garbage collection, hundreds of thousands of objects, and collect
    less often."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    seed_everything()


@pytest.fixture(scope="session", autouse=True)
def _poisoned_memory():
    """Poison the tensors of ``torch.empty`` and its variants, so that unwritten elements show.

    Floats become NaN, other dtypes bytes of 0xCD. Fresh memory often holds zeros or old results, which would hide
    missing writes.
    """
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
            patch.setattr(owner, name, _poisoning(getattr(owner, name)))
        yield


def _poisoning(allocate):
    def allocate_poisoned(*args, **kwargs):
        tensor = allocate(*args, **kwargs)
        if type(tensor) is torch.Tensor and tensor.device.type in ("cpu", "cuda") and not tensor.is_sparse:
            with torch.no_grad():
                if tensor.is_floating_point() or tensor.is_complex():
                    tensor.fill_(torch.nan)
                elif tensor.dtype == torch.bool:
                    tensor.fill_(True)
                else:
                    (tensor if tensor.dim() else tensor.view(1)).view(torch.uint8).fill_(POISON_BYTE)
        return tensor

    return allocate_poisoned
