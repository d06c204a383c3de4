"""Training on several ranks that share one GPU, over NCCL, in less than five minutes: for the results, not the speed.

    make test-gpu-nccl
    make test-gpu-nccl PARTS="device options" OUT=/some/folder

NCCL takes one rank per GPU of a host. So each rank says that it has a host of its own (``NCCL_HOSTID``), and they talk
over sockets. The parts, from what is needed most to what takes longest, each with its JUnit file: ``streams``, what
traces record of them; ``device`` and ``host``, gradients and parameters where all is computed on the GPU, and where a
part of it is computed on the host; ``options``, as many programs of all kinds as there is time for. ``nccl.log`` holds
what NCCL had to say.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from bench.gpu import pytest_runs
from bench.gpu.parts import Part, Result, main
from bench.lib.budget import Budget
from bench.lib.record import results_folder

BUDGET_S = 280.0
TOGETHER = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",  # kernels of several communicators and ranks must fit the GPU at the same time
    "NCCL_BUFFSIZE": str(2**20),
    "NCCL_DEBUG": "WARN",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # whoever asks for a GPU before it forks must not start CUDA
}
"""Settings under which ranks can share a GPU."""


def ranks(name: str, *arguments: str) -> Callable[[Budget], Result]:
    """The work of a part: it runs tests one after the other, and keeps the messages of NCCL."""

    def work(budget: Budget) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            environment = TOGETHER | {"NCCL_DEBUG_FILE": f"{folder}/%h.%p"}
            result = pytest_runs.run(name, arguments, budget, environment=environment)
            said = [path.read_text(errors="replace") for path in sorted(Path(folder).iterdir())]
        with (results_folder("cuda") / "nccl.log").open("a") as log:
            log.write("".join([f"== {name}\n", *said]))
        return result

    return work


PARTS = (
    Part("streams", ranks("streams", "tests/sync/engine/test_tracing.py"), most_s=40),
    Part("device", ranks("device", "tests/sync/attach/test_gpu.py", "-k", "device"), most_s=90, least_s=30),
    Part("host", ranks("host", "tests/sync/attach/test_gpu.py", "-k", "host"), most_s=90, least_s=30),
    Part("options", ranks("options", "tests/sync/programs/test_options.py"), most_s=240, least_s=40),
)

if __name__ == "__main__":
    sys.exit(main("gpu_nccl", PARTS, BUDGET_S))
