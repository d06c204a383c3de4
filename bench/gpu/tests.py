"""The tests that need a GPU and one process each, on all cores, in less than six minutes.

    make test-gpu
    make test-gpu PARTS=compile OUT=/some/folder

Two parts: ``numerics``, every kernel by the tests of the compressors, and ``compile``, a few of those of
``torch.compile``, each of which takes seconds. Each writes a JUnit file, ``numerics.xml`` and ``compile.xml``. Training
on several ranks is tested by ``make test-gpu-nccl``.
"""

from __future__ import annotations

import sys

from bench.gpu import pytest_runs
from bench.gpu.parts import Part, Result, main
from bench.lib.budget import Budget

BUDGET_S = 335.0  # the rest of the six minutes goes into starting Python and finding the GPU
TORCH_COMPILE = "tests/conformance/test_compile.py"
COMPILED = "EFSignSGD or BlockQuant or Cast16 or ChunkTopK"  # one for each kind of launcher


def numerics(budget: Budget) -> Result:
    """Everything but training and ``torch.compile``."""
    arguments = ["tests", "--ignore=tests/sync", f"--ignore={TORCH_COMPILE}"]
    return pytest_runs.run("numerics", arguments, budget, workers=pytest_runs.num_workers())


def compiled(budget: Budget) -> Result:
    """``torch.compile`` with a few compressors."""
    return pytest_runs.run("compile", [TORCH_COMPILE, "-k", COMPILED], budget, workers=pytest_runs.num_workers())


PARTS = (
    Part("numerics", numerics, most_s=290, least_s=60),
    Part("compile", compiled, most_s=90, least_s=40),
)

if __name__ == "__main__":
    sys.exit(main("gpu_tests", PARTS, BUDGET_S))
