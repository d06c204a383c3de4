"""A description of the machine: versions, driver, clocks, and the NVIDIA tools that are installed.

Writes ``machine.json``.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil

import torch
import triton

from bench.gpu import counters, memcheck
from bench.gpu.parts import Result
from bench.lib import nvidia_smi
from bench.lib.budget import Budget
from bench.lib.program import found
from bench.lib.record import results_folder
from gckernels.devices import architecture_of

PACKAGES = ("hypothesis", "matplotlib", "numpy", "pytest", "pytest-timeout", "pytest-xdist")
FIELDS = (
    *("name", "driver_version", "compute_cap", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem"),
    *("power.limit", "temperature.gpu", "memory.total", "ecc.mode.current", "compute_mode"),
)

TOOLS = {"ncu": counters.PLACES, "compute-sanitizer": memcheck.PLACES, "nsys": ()}


def describe(budget: Budget) -> Result:
    """Write the description to a file; the result repeats it in a few lines."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "architecture": architecture_of(torch.device("cuda")),
        "nccl": _nccl(),
        "triton": triton.__version__,
        "packages": {name: _version(name) for name in PACKAGES},
        "cores": os.cpu_count(),
        "multiprocessors": properties.multi_processor_count,
        "l2_nbytes": properties.L2_cache_size,
        "memory_nbytes": properties.total_memory,
        "nvidia-smi": nvidia_smi.query(*FIELDS),
        "tools": {name: found(name, *places) for name, places in TOOLS.items()},
        "c compiler": next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None),
    }
    path = results_folder("cuda") / "machine.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1) + "\n")
    lines = [
        f"{facts['nvidia-smi'].get('name', properties.name)}, torch {torch.__version__}, Triton {triton.__version__}"
    ]
    lines += [f"{name}: {json.dumps(value)}" for name, value in facts.items()]
    return Result(True, lines)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nccl() -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):  # torch was built without NCCL
        return None
