"""Imports between the parts of the package all point downwards."""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = ("programs", "plans", "resources", "states", "messages", "engine", "attach")
"""The folders of ``sync/``, from the lowest to the highest."""
BESIDE = ("planner", "profiling", "recording", "reporting", "lab", "tuning", "commands")
"""Its other folders. Nothing imports the commands."""


def modules(*folders: str) -> Iterator[tuple[str, Path]]:
    """The dotted names and files of all modules in folders of the repository."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            if parts[:2] == ["gckernels", "sync"]:  # a link to sync/
                continue
            if parts[0] == "sync":
                parts.insert(0, "gckernels")
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def imported(name: str, path: Path) -> Iterator[str]:
    """The dotted names of everything that a module imports, including imports inside functions and for types."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def is_in(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


@functools.cache
def arrows(*folders: str) -> list[tuple[str, str]]:
    """The pairs ``(module, import)`` of all imports of the modules."""
    return [(name, target) for name, path in modules(*folders) for target in imported(name, path)]


def library() -> list[tuple[str, str]]:
    """The imports of the package without its parts for tests."""
    outside = ("gckernels.testing", "gckernels.__main__")
    return [(name, target) for name, target in arrows("gckernels") if not is_in(name, *outside)]


def floor_of(name: str) -> str:
    """The folder of ``sync/`` to which a module or name belongs, or ``""``."""
    parts = name.split(".")
    return parts[2] if parts[:2] == ["gckernels", "sync"] and len(parts) > 2 else ""


def test_there_are_arrows():
    assert len(arrows("gckernels")) > 300 and len(arrows("sync")) > 300
    assert {floor_of(name) for name, _ in arrows("sync")} >= {*FLOORS, *BESIDE}


def test_compressors_know_nothing_of_communication():
    assert [arrow for arrow in library() if is_in(arrow[1], "gckernels.sync", "torch.distributed")] == []


def test_the_toolkit_knows_no_algorithm():
    wrong = [arrow for arrow in library() if is_in(arrow[0], "gckernels.toolkit") and is_in(arrow[1], "gckernels.ops")]
    assert wrong == []


def test_no_module_of_gckernels_imports_itself_through_others():
    """In a cycle ``graphlib`` raises a CycleError that names the modules. Imports inside functions count."""
    names = {name for name, _ in arrows("gckernels")}
    arrows_to: dict[str, set[str]] = {name: set() for name in names}
    for name, target in arrows("gckernels"):
        module = target if target in names else target.rpartition(".")[0]  # the target may be a name in a module
        if module in names - {name}:
            arrows_to[name].add(module)
    order = list(graphlib.TopologicalSorter(arrows_to).static_order())
    assert order.index("gckernels.compressor") < order.index("gckernels.registration")


def test_what_is_for_tests_is_imported_by_tests():
    assert [arrow for arrow in [*library(), *arrows("sync")] if is_in(arrow[1], "gckernels.testing")] == []


@pytest.mark.parametrize("floor", FLOORS)
def test_folders_import_downwards(floor):
    above = FLOORS[FLOORS.index(floor) + 1 :]
    mine = [arrow for arrow in arrows("sync") if floor_of(arrow[0]) == floor]
    assert mine
    assert [arrow for arrow in mine if floor_of(arrow[1]) in (*above, *BESIDE)] == []


def test_modules_are_in_folders():
    outside = {name for name, _ in arrows("sync") if floor_of(name) not in (*FLOORS, *BESIDE)}
    assert outside == {"gckernels.sync"}


@pytest.mark.parametrize("folder", ["programs", "plans", "planner"])
def test_what_is_planned_knows_no_process_groups(folder):
    mine = [arrow for arrow in arrows("sync") if floor_of(arrow[0]) == folder]
    assert mine and [arrow for arrow in mine if is_in(arrow[1], "torch.distributed")] == []


def test_the_planner_imports_programs_and_plans_alone():
    inside = [
        arrow for arrow in arrows("sync") if floor_of(arrow[0]) == "planner" and is_in(arrow[1], "gckernels.sync")
    ]
    assert inside and {floor_of(target) for _, target in inside} <= {"programs", "plans", "planner"}


def test_the_lab_imports_nothing_else_of_the_package():
    """Not even torch: its command and its helpers start in an instant."""
    mine = [arrow for arrow in arrows("sync") if floor_of(arrow[0]) == "lab"]
    assert (
        mine
        and [arrow for arrow in mine if is_in(arrow[1], "torch", "gckernels") and floor_of(arrow[1]) != "lab"] == []
    )


def test_only_the_commands_import_the_tuning():
    others = [arrow for arrow in arrows("sync") if floor_of(arrow[0]) not in ("tuning", "commands", "")]
    assert others and [arrow for arrow in others if floor_of(arrow[1]) == "tuning"] == []


def test_reports_are_written_from_above():
    """Attachments know nothing of pages; what is public about them adds the reports."""
    others = [arrow for arrow in arrows("sync") if floor_of(arrow[0]) not in ("reporting", "tuning", "commands")]
    assert others and [arrow for arrow in others if floor_of(arrow[1]) == "reporting"] == []


def test_nothing_imports_the_commands():
    others = [arrow for arrow in [*library(), *arrows("sync")] if floor_of(arrow[0]) != "commands"]
    assert others and [arrow for arrow in others if floor_of(arrow[1]) == "commands"] == []


def test_tests_import_neither_benchmarks_nor_examples():
    names = {path.stem for _, path in modules("examples")}
    wrong = [arrow for arrow in arrows("tests") if is_in(arrow[1], "bench", "examples", *names)]
    assert wrong == []
