"""The single-process tests that need a GPU, on all cores, in less than six minutes.

    make test-gpu
    make test-gpu PARTS=compile OUT=/some/folder

The part ``numerics`` runs every kernel in the tests of the compressors. The part ``compile`` runs a few of the tests of
``torch.compile``, each of which takes seconds. They write the JUnit files ``numerics.xml`` and ``compile.xml``.
``make test-gpu-nccl`` tests training on several ranks.
"""

from __future__ import annotations

import sys

from bench.gpu import pytest_runs
from bench.gpu.parts import Part, Result, main
from bench.lib.budget import Budget

BUDGET_S = 335.0  # the rest of the six minutes is for starting Python and finding the GPU
TORCH_COMPILE = "tests/conformance/test_compile.py"
COMPILED = "EFSignSGD or BlockQuant or Cast16 or ChunkTopK"  # one for each kind of launcher


def numerics(budget: Budget) -> Result:
    """Run all tests but those of training and ``torch.compile``."""
    arguments = ["tests", "--ignore=tests/sync", f"--ignore={TORCH_COMPILE}"]
    return pytest_runs.run("numerics", arguments, budget, workers=pytest_runs.num_workers())


def compiled(budget: Budget) -> Result:
    """Run the tests of ``torch.compile`` with a few compressors."""
    return pytest_runs.run("compile", [TORCH_COMPILE, "-k", COMPILED], budget, workers=pytest_runs.num_workers())


PARTS = (
    Part("numerics", numerics, max_s=290, min_s=60),
    # the tests keep all cores busy without inductor's own processes
    Part("compile", compiled, max_s=90, min_s=40, environment={"TORCHINDUCTOR_COMPILE_THREADS": "1"}),
)

if __name__ == "__main__":
    sys.exit(main("gpu_tests", PARTS, BUDGET_S))
