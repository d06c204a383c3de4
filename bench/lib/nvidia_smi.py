"""Driver version and clocks as ``nvidia-smi`` and torch report them; nothing is set."""

from __future__ import annotations

import functools
import shutil
import subprocess

import torch


def query(*fields: str) -> dict[str, str]:
    """Values of fields, such as ``driver_version``, of the first GPU; empty if ``nvidia-smi`` is absent or fails."""
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
    fields = query("driver_version", "clocks.mem")  # starting a process takes too long to do it for every row
    return {"driver": fields.get("driver_version", ""), "memory_clock_mhz": fields.get("clocks.mem", "")}


def columns() -> dict[str, str]:
    """Columns with driver version and clocks for a row of results; empty where they cannot be read.

    The multiprocessors' clock is read now, the memory's clock was read for the first row.
    """
    try:
        clock_mhz = str(torch.cuda.clock_rate())
    except Exception:  # torch needs an optional package for it, whose errors have a class of their own
        clock_mhz = ""
    return _once() | {"sm_clock_mhz": clock_mhz}
