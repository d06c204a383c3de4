"""Imports between the parts of the package all point downwards."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PURE = ("programs", "plans", "traces", "accuracy", "planner")
"""The folders of ``sync/`` that know no process group."""
UPWARDS = ("gckernels.sync.frontends.kinds", "gckernels.sync.tuning.proposers")
"""The modules that import front ends, or the proposer of predicted plans, from above when these are asked for."""
TRAINERS = ("accelerate", "lightning", "torchft", "torchtitan", "transformers")
"""Packages that need not be installed."""
MAX_MODULES = 14
"""The largest number of modules in a folder of ``sync/``."""


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
    """The dotted names of everything that a module imports, including imports inside functions, those for
    types, and those by ``importlib``, but for :data:`UPWARDS`."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module":
            match node.args:
                case [ast.Constant(str(relative)), ast.Name("__package__")] if name not in UPWARDS:
                    yield importlib.util.resolve_name(relative, ".".join(package))


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


def folders_of_sync() -> dict[str, set[str]]:
    """The folders of ``sync/``, nested ones too, with those from which their modules import."""
    places = {name: path.parent.relative_to(ROOT).as_posix() for name, path in modules("sync")}
    found: dict[str, set[str]] = {place: set() for place in places.values()}
    for name, target in arrows("sync"):
        module = target if target in places else target.rpartition(".")[0]
        if module in places and places[module] != places[name]:
            found[places[name]].add(places[module])
    return found


def test_there_are_arrows():
    assert len(arrows("gckernels")) > 300 and len(arrows("sync")) > 300
    assert {floor_of(name) for name, _ in arrows("sync")} >= {*PURE, "frontends", "engine", "tuning"}


def test_compressors_know_nothing_of_communication():
    assert [arrow for arrow in library() if is_in(arrow[1], "gckernels.sync", "torch.distributed")] == []


def test_the_toolkit_knows_no_algorithm():
    wrong = [arrow for arrow in library() if is_in(arrow[0], "gckernels.toolkit") and is_in(arrow[1], "gckernels.ops")]
    assert wrong == []


@pytest.mark.parametrize("folder", ["gckernels", "sync"])
def test_no_module_imports_itself_through_others(folder):
    """In a cycle ``graphlib`` raises a CycleError that names the modules. Imports inside functions count."""
    names = {name for name, _ in arrows(folder)}
    arrows_to: dict[str, set[str]] = {name: set() for name in names}
    for name, target in arrows(folder):
        module = target if target in names else target.rpartition(".")[0]  # the target may be a name in a module
        if module in names - {name}:
            arrows_to[name].add(module)
    assert len(list(graphlib.TopologicalSorter(arrows_to).static_order())) > 100


def test_no_folder_of_sync_imports_itself_through_others():
    order = list(graphlib.TopologicalSorter(folders_of_sync()).static_order())
    assert order.index("sync/programs") < order.index("sync/engine") < order.index("planner/commands")


def test_folders_of_sync_are_small():
    counts = Counter(path.parent for _, path in modules("sync"))
    assert {str(folder): count for folder, count in counts.items() if count > MAX_MODULES} == {}


def test_what_is_for_tests_is_imported_by_tests():
    tools = [arrow for arrow in [*library(), *arrows("sync")] if is_in(arrow[1], "gckernels.testing", "harness")]
    assert tools == []
    for_third_parties = [arrow for arrow in arrows("gckernels") if is_in(arrow[0], "gckernels.testing")]
    assert [arrow for arrow in for_third_parties if is_in(arrow[1], "gckernels.sync", "harness")] == []


def test_modules_are_in_folders():
    assert {name for name, _ in arrows("sync") if not floor_of(name)} == {"gckernels.sync"}


@pytest.mark.parametrize("folder", PURE)
def test_what_is_planned_knows_no_process_groups(folder):
    mine = [arrow for arrow in arrows("sync") if floor_of(arrow[0]) == folder]
    assert mine and [arrow for arrow in mine if is_in(arrow[1], "torch.distributed")] == []


@pytest.mark.parametrize("folder", PURE)
def test_what_is_pure_imports_only_what_is_pure(folder):
    inside = [arrow for arrow in arrows("sync") if floor_of(arrow[0]) == folder and is_in(arrow[1], "gckernels.sync")]
    assert inside and {floor_of(target) for _, target in inside} <= {*PURE}


def test_the_lab_imports_nothing_else_of_the_package():
    """Not even torch: its command and its helpers start in an instant."""
    mine = [arrow for arrow in arrows("sync") if floor_of(arrow[0]) == "lab"]
    assert (
        mine
        and [arrow for arrow in mine if is_in(arrow[1], "torch", "gckernels") and floor_of(arrow[1]) != "lab"] == []
    )


@pytest.mark.parametrize(
    ("folder", "importers"),
    [
        ("attaching", {"integrations"}),
        ("tuning", {"attaching", "commands", "integrations", "predictive"}),
        ("predictive", set()),  # its name alone is known to what imports it when a training asks for predictions
        ("planner", {"predictive", "profiling", "commands"}),
        (
            "frontends",
            {"attaching", "stats", "tracing", "reporting", "predictive", "tuning", "commands", "integrations"},
        ),
        ("reporting", {"attaching", "commands"}),
        ("commands", set()),
        ("integrations", set()),
    ],
)
def test_a_folder_is_imported_from_above_alone(folder, importers):
    others = [arrow for arrow in arrows("sync") if floor_of(arrow[0]) not in (*importers, folder, "")]
    assert others and [arrow for arrow in others if floor_of(arrow[1]) == folder] == []


@pytest.mark.parametrize("package", TRAINERS)
def test_a_trainer_is_imported_by_its_own_module_alone(package):
    importers = {name for name, target in [*library(), *arrows("sync")] if is_in(target, package)}
    assert importers == {f"gckernels.sync.integrations.{package}"}


def test_tests_import_neither_benchmarks_nor_examples():
    names = {path.stem for _, path in modules("examples")}
    wrong = [arrow for arrow in arrows("tests") if is_in(arrow[1], "bench", "examples", *names)]
    assert wrong == []
