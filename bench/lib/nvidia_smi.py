"""Driver and clocks, as ``nvidia-smi`` and torch report them; only read, never set."""

from __future__ import annotations

import functools
import shutil
import subprocess

import torch


def query(*fields: str) -> dict[str, str]:
    """The fields of the first GPU, such as ``driver_version``; empty without the tool, or when it fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    command = [tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (subprocess.SubprocessError, OSError):
        return {}
    values = answer.splitlines()[0].split(",") if answer.strip() else []
    return dict(zip(fields, (value.strip() for value in values), strict=False))


@functools.cache
def _once() -> dict[str, str]:
    found = query("driver_version", "clocks.mem")  # a process takes long: not for every row
    return {"driver": found.get("driver_version", ""), "memory_clock_mhz": found.get("clocks.mem", "")}


def columns() -> dict[str, str]:
    """Driver and clocks for a row of results: the clock of the multiprocessors as it is now, that of the memory as it
    was at the first row; empty where they cannot be read."""
    try:
        clock_mhz = str(torch.cuda.clock_rate())
    except (ImportError, RuntimeError):  # torch asks a package that need not be there
        clock_mhz = ""
    return _once() | {"sm_clock_mhz": clock_mhz}
