"""Tests of training on several ranks that share one GPU over NCCL, in less than five minutes; speed is not measured.

    make test-gpu-nccl
    make test-gpu-nccl PARTS="device options" OUT=/some/folder

NCCL accepts one rank per GPU and host. Each rank therefore claims a separate host (``NCCL_HOSTID``), and the ranks
communicate over sockets. Every part writes a JUnit file, and may take at most as long as said here:

- ``trainings`` (60 s): one training each of DDP, FSDP2 and averaged updates, on two ranks, with the digests of the CPU;
- ``sanitizer`` (60 s): the trainings of DDP and FSDP2 under torch's CUDA sanitizer, which looks for accesses from
  streams that do not wait for each other;
- ``streams`` (40 s): what traces record of CUDA streams;
- ``device`` (130 s) and ``host`` (90 s): gradients and parameters, with everything computed on the GPU, and with a part
  of it computed on the host; of two and four ranks, compared with the same training on the CPU over Gloo; ``device``
  also captures a step, with its collectives, as a CUDA graph;
- ``options`` (240 s): as many programs of all kinds as time allows.

``nccl.log`` has NCCL's own messages.
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
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # looking for a GPU must not start CUDA in a process that forks later
}
"""Environment variables under which ranks can share a GPU."""


def ranks(name: str, *arguments: str) -> Callable[[Budget], Result]:
    """The work of a part: a function that runs tests one after the other and logs the messages of NCCL."""

    def work(budget: Budget) -> Result:
        with tempfile.TemporaryDirectory() as folder:
            environment = TOGETHER | {"NCCL_DEBUG_FILE": f"{folder}/%h.%p"}
            result = pytest_runs.run(name, arguments, budget, environment=environment)
            messages = [path.read_text(errors="replace") for path in sorted(Path(folder).iterdir())]
        with (results_folder("cuda") / "nccl.log").open("a") as log:
            log.write("".join([f"== {name}\n", *messages]))
        return result

    return work


CAPTURED = "tests/sync/messages/test_captured_steps.py"
TRAINED = "tests/sync/frontends/test_gpu.py"
FIRST = "2-attach or 2-sharded or 2-updates"

PARTS = (
    Part("trainings", ranks("trainings", TRAINED, "-k", FIRST), max_s=60, min_s=30),
    Part("sanitizer", ranks("sanitizer", TRAINED, "-k", "sanitizer"), max_s=60, min_s=30),
    Part("streams", ranks("streams", "tests/sync/engine/test_timeline_recorder.py"), max_s=40),
    Part(
        "device",
        ranks("device", TRAINED, CAPTURED, "-k", f"device and not (sanitizer or {FIRST})"),
        max_s=130,
        min_s=30,
    ),
    Part("host", ranks("host", TRAINED, "-k", "host"), max_s=90, min_s=30),
    Part("options", ranks("options", "tests/sync/programs/test_options.py"), max_s=240, min_s=40),
)

if __name__ == "__main__":
    sys.exit(main("gpu_nccl", PARTS, BUDGET_S))
