"""The orders of the synchronisation: every call by which work waits for other work, and the code without it.

A call is named by its file, its function and what it calls. Tests without one of these calls must find races, wrong
numbers or errors on the simulated device; otherwise the call is superfluous, or a test is missing.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_SYNC = ROOT / "sync"
_COPIED = (
    "gckernels",
    "sync",
    "patches",
    "planner",
    "tests",
    "harness",
    "bench",
    "conftest.py",
    "pyproject.toml",
    "build/simulated_device",
)

_WITHOUT = {
    "event_behind": "(lambda stream: __import__('torch').Event(stream.device))({arguments})",  # behind nothing
    "future_on": "__import__('torch').futures.Future()",
    "here": "__import__('gckernels.sync.resources.workers', fromlist=['Token']).Token(is_done=True)",
    "on_stream": "__import__('contextlib').nullcontext()",
    "set_result": "{owner}.set_result(None)",
    "synchronize": "None",
    "used_here": "None",
    "wait": "None",
    "wait_event": "None",
    "wait_stream": "None",
}


@dataclass(frozen=True)
class Order:
    """A call that puts work of a device behind other work.

    Attributes:
        path: its file, from the folder of the synchronisation.
        name: ``function: called``, with a number from the second one of a function on.
        start, end: its first and last byte in the file.
        without: the code that replaces it.
    """

    path: str
    name: str
    start: int
    end: int
    without: str

    @property
    def key(self) -> str:
        return f"{self.path} {self.name}"


def orders() -> Iterator[Order]:
    """All orders. Events with times are none: they mark moments."""
    for path in sorted(_SYNC.rglob("*.py")):
        yield from _orders_of(path.relative_to(_SYNC).as_posix(), path.read_text())


def _orders_of(path: str, source: str) -> Iterator[Order]:
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    counts: dict[str, int] = {}
    for scope, call in _calls(ast.parse(source), ""):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if called not in _WITHOUT or any(each.arg == "is_timed" for each in call.keywords):
            continue
        owner = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
        counts[f"{scope}: {called}"] = number = counts.get(f"{scope}: {called}", 0) + 1
        name = f"{scope}: {called}" + (f" {number}" if number > 1 else "")
        without = _WITHOUT[called].format(owner=owner, arguments=", ".join(map(ast.unparse, call.args)))
        assert call.end_lineno is not None and call.end_col_offset is not None
        start, end = starts[call.lineno - 1] + call.col_offset, starts[call.end_lineno - 1] + call.end_col_offset
        yield Order(path, name, start, end, without)


def _calls(node: ast.AST, scope: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef):
            yield from _calls(child, f"{scope}.{child.name}".lstrip("."))
        else:
            if isinstance(child, ast.Call):
                yield scope, child
            yield from _calls(child, scope)


def copy_without(order: Order, folder: Path) -> None:
    """Copy the project and its tests into a folder, without an order."""
    for name in _COPIED:
        source, target = ROOT / name, folder / name
        if source.is_dir():
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, target, symlinks=True, ignore=ignore, dirs_exist_ok=True)
        elif source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, target)
    changed = folder / _SYNC.name / order.path
    code = changed.read_bytes()
    changed.write_bytes(code[: order.start] + order.without.encode() + code[order.end :])


def run_tests(folder: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run tests of a copy of the project on the simulated device."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *arguments]
    environment = {"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin:/usr/local/bin"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
