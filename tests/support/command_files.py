"""Files for tests of the command: a small trace, and runs of the command in this process."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from gckernels.planner import commands
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import Role, TracedTensor

LAYERS = 4
NUMEL = 1 << 18


def small_trace(backward_s: float = 0.02, buckets: bool = False) -> ModelTrace:
    """A model of four matrices, each with a vector."""
    tensors = []
    for layer in reversed(range(LAYERS)):
        ready_s = backward_s * (LAYERS - layer) / LAYERS
        tensors.append(TracedTensor(f"{layer}.bias", 512, ready_s, (512,), role=Role.VECTOR))
        tensors.append(TracedTensor(f"{layer}.weight", NUMEL, ready_s, (512, 512)))
    halves = (tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :])
    names = tuple(tuple(tensor.name for tensor in half) for half in halves) if buckets else ()
    return ModelTrace("small", tuple(tensors), backward_s, forward_s=0.01, optimizer_s=0.002, buckets=names)


def write_small_trace(folder: Path, **options: Any) -> str:
    """Write the trace to a file, and return its path."""
    path = folder / "small.trace.json"
    small_trace(**options).save(path)
    return str(path)


def write_small_plan(folder: Path, machine: str) -> str:
    """Write the plan of the policy ``all`` for the small trace on a shipped machine, and return its path."""
    path = folder / "plan.json"
    path.write_bytes(_small_plan(machine))
    return str(path)


@functools.cache
def _small_plan(machine: str) -> bytes:
    """The plan that the command writes, which is made once for all tests."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        trace, path = write_small_trace(Path(folder)), Path(folder, "plan.json")
        assert commands.main(["plan", trace, machine, "--policy", "all", "-o", str(path)]) == 0
        return path.read_bytes()


def run_json(capsys: Any, *arguments: str) -> tuple[int, Any]:
    """The exit code of a command and its results, with ``--json``."""
    capsys.readouterr()
    code = commands.main([*arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def run_text(capsys: Any, *arguments: str) -> tuple[int, str, str]:
    """The exit code of a command, and the texts on stdout and stderr."""
    capsys.readouterr()
    code = commands.main(list(arguments))
    printed = capsys.readouterr()
    return code, printed.out, printed.err
