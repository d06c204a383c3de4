"""Imports between the parts of the package all point downwards."""

from __future__ import annotations

import ast
import functools
import graphlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKED = ("sync", "patches", "planner")
"""The folders beside ``gckernels/`` to which it has links, the lower ones first."""
PURE = (
    *(f"sync/{room}" for room in ("programs", "plans", "traces", "accuracy")),
    *(f"planner/{room}" for room in ("machines", "timeline", "drafts", "search", "policies", "auto", "choice")),
)
"""The rooms that know no process group."""
UPWARDS = ("gckernels.sync.frontends.kinds",)
"""The module that imports front ends, from above, when these are asked for."""
TRAINERS = ("accelerate", "lightning", "torchft", "torchtitan", "transformers")
"""Packages that need not be installed."""
MAX_MODULES = 14
"""The largest number of modules in a folder of a linked package."""


def modules(*folders: str) -> Iterator[tuple[str, Path]]:
    """The dotted names and files of all modules in folders of the repository."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            if parts[0] == "gckernels" and parts[1] in LINKED:  # found in the folder that the link leads to
                continue
            if parts[0] in LINKED:
                parts.insert(0, "gckernels")
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@functools.cache
def imported(name: str, path: Path) -> tuple[str, ...]:
    """The dotted names of everything that a module imports, including imports inside functions and those for types; of
    :data:`UPWARDS` only what is imported at once."""
    if name in UPWARDS:
        return tuple(imports_of(name, path, ast.parse(path.read_text()).body))
    return tuple(imports_of(name, path))


def imports_of(name: str, path: Path, among: Iterable[ast.AST] | None = None) -> Iterator[str]:
    """The dotted names in the import statements of a module, or among some of its nodes."""
    package = package_of(name, path)
    for node in ast.walk(ast.parse(path.read_text())) if among is None else among:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from (f"{module}.{alias.name}" for alias in node.names)


def package_of(name: str, path: Path) -> list[str]:
    """The package whose relative names a module uses."""
    return name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]


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
    """The room of a linked package to which a module or name belongs, such as ``"sync/engine"``, or ``""``."""
    parts = name.split(".")
    return "/".join(parts[1:3]) if parts[0] == "gckernels" and parts[1:2] and parts[1] in LINKED and parts[2:] else ""


def folders() -> dict[str, set[str]]:
    """The folders of the linked packages, nested ones too, with those from which their modules import. The packages
    themselves, which name what they offer, are above all."""
    offering = {f"gckernels.{each}" for each in LINKED}
    places = {name: path.parent.relative_to(ROOT).as_posix() for name, path in modules(*LINKED) if name not in offering}
    found: dict[str, set[str]] = {place: set() for place in places.values()}
    for name, target in ((name, target) for name, target in arrows(*LINKED) if name in places):
        module = target if target in places else target.rpartition(".")[0]
        if module in places and places[module] != places[name]:
            found[places[name]].add(places[module])
    return found


def test_there_are_arrows():
    assert all(len(arrows(folder)) > 300 for folder in ("gckernels", "sync", "planner")) and len(arrows("patches")) > 50
    assert {floor_of(name) for name, _ in arrows(*LINKED)} >= {*PURE, "sync/frontends", "sync/engine", "sync/tuning"}


def test_compressors_know_nothing_of_communication():
    above = ("gckernels.sync", "gckernels.patches", "gckernels.planner", "torch.distributed")
    assert [arrow for arrow in library() if is_in(arrow[1], *above)] == []


def test_patches_work_without_the_planner():
    """The wire format knows neither stores nor ranks."""
    assert [arrow for arrow in arrows("patches") if is_in(arrow[1], "gckernels.planner")] == []
    mine = [arrow for arrow in arrows("patches") if floor_of(arrow[0]) == "patches/format"]
    above = ("gckernels.sync", "torch.distributed", "gckernels.patches.chain")
    assert mine and [arrow for arrow in mine if is_in(arrow[1], *above)] == []


def test_the_synchronisation_works_without_the_planner():
    """A training loads the planner only if it is given something of it."""
    found = [(name, target) for name, path in modules("sync") for target in imports_of(name, path)]
    assert [arrow for arrow in found if is_in(arrow[1], "gckernels.patches", "gckernels.planner")] == []


def test_nothing_is_imported_by_a_string():
    """Type checkers and editors, and the tests here, do not see what is."""
    assert [name for name, path in modules("gckernels", *LINKED) if "import_module" in path.read_text()] == []


def test_the_toolkit_knows_no_algorithm():
    wrong = [arrow for arrow in library() if is_in(arrow[0], "gckernels.toolkit") and is_in(arrow[1], "gckernels.ops")]
    assert wrong == []


@pytest.mark.parametrize("parts", [("gckernels",), LINKED], ids="+".join)
def test_no_module_imports_itself_through_others(parts):
    """In a cycle ``graphlib`` raises a CycleError that names the modules. Imports inside functions count."""
    names = {name for name, _ in arrows(*parts)}
    arrows_to: dict[str, set[str]] = {name: set() for name in names}
    for name, target in arrows(*parts):
        module = target if target in names else target.rpartition(".")[0]  # the target may be a name in a module
        if module in names - {name}:
            arrows_to[name].add(module)
    assert len(list(graphlib.TopologicalSorter(arrows_to).static_order())) > 100


def test_no_folder_imports_itself_through_others():
    order = list(graphlib.TopologicalSorter(folders()).static_order())
    assert order.index("sync/programs") < order.index("sync/engine") < order.index("planner/commands")


def test_folders_are_small():
    counts = Counter(path.parent for _, path in modules(*LINKED))
    assert {str(folder): count for folder, count in counts.items() if count > MAX_MODULES} == {}


def test_what_is_for_tests_is_imported_by_tests():
    tools = [arrow for arrow in [*library(), *arrows(*LINKED)] if is_in(arrow[1], "gckernels.testing", "harness")]
    assert tools == []
    for_third_parties = [arrow for arrow in arrows("gckernels") if is_in(arrow[0], "gckernels.testing")]
    above = ("gckernels.sync", "gckernels.patches", "gckernels.planner", "harness")
    assert [arrow for arrow in for_third_parties if is_in(arrow[1], *above)] == []


def test_modules_are_in_folders():
    alone = {name for name, path in modules(*LINKED) if path.parent in [ROOT / folder for folder in LINKED]}
    planner = {f"gckernels.planner{module}" for module in ("", ".auto", ".choice")}
    assert alone == {"gckernels.sync", "gckernels.patches", *planner}


@pytest.mark.parametrize("room", PURE)
def test_what_is_planned_knows_no_process_groups(room):
    mine = [arrow for arrow in arrows(*LINKED) if floor_of(arrow[0]) == room]
    assert mine and [arrow for arrow in mine if is_in(arrow[1], "torch.distributed")] == []


@pytest.mark.parametrize("room", PURE)
def test_what_is_pure_imports_only_what_is_pure(room):
    mine = [arrow for arrow in arrows(*LINKED) if floor_of(arrow[0]) == room]
    inside = [arrow for arrow in mine if is_in(arrow[1], "gckernels.sync", "gckernels.planner")]
    assert inside and {floor_of(target) for _, target in inside} <= {*PURE}


def test_the_lab_imports_nothing_else_of_the_package():
    """Not even torch: its command and its helpers start in an instant."""
    mine = [arrow for arrow in arrows("sync") if floor_of(arrow[0]) == "sync/lab"]
    outside = [arrow for arrow in mine if floor_of(arrow[1]) != "sync/lab"]
    assert mine and [arrow for arrow in outside if is_in(arrow[1], "torch", "gckernels")] == []


ABOVE_FRONT_ENDS = ("attaching", "integrations", "reporting", "stats", "tracing", "tuning")
ABOVE_DRAFTS = ("auto", "choice", "commands", "policies", "predictive", "search")


@pytest.mark.parametrize(
    ("room", "importers"),
    [
        ("sync/attaching", {"sync/integrations"}),
        ("sync/tuning", {"sync/attaching", "sync/integrations", "planner/commands", "planner/predictive"}),
        ("sync/frontends", {*(f"sync/{each}" for each in ABOVE_FRONT_ENDS), "planner/commands", "planner/predictive"}),
        ("sync/reporting", {"sync/attaching"}),
        ("sync/integrations", set()),
        ("planner/timeline", {"planner/drafts", *(f"planner/{each}" for each in ABOVE_DRAFTS)}),
        ("planner/drafts", {f"planner/{each}" for each in ABOVE_DRAFTS}),
        ("planner/search", {"planner/auto", "planner/policies"}),
        ("planner/policies", {"planner/choice"}),
        ("planner/auto", {"planner/choice"}),
        ("planner/choice", {"planner/commands", "planner/predictive"}),
        ("planner/profiling", {"planner/commands", "planner/predictive"}),
        ("planner/predictive", set()),  # a training gets it from its user
        ("planner/commands", set()),
    ],
)
def test_a_room_is_imported_from_above_alone(room, importers):
    others = [arrow for arrow in arrows(*LINKED) if floor_of(arrow[0]) not in (*importers, room, "")]
    assert others and [arrow for arrow in others if floor_of(arrow[1]) == room] == []


@pytest.mark.parametrize("package", TRAINERS)
def test_a_trainer_is_imported_by_its_own_module_alone(package):
    importers = {name for name, target in [*library(), *arrows(*LINKED)] if is_in(target, package)}
    assert importers == {f"gckernels.sync.integrations.{package}"}


def test_tests_import_neither_benchmarks_nor_examples():
    names = {path.stem for _, path in modules("examples")}
    wrong = [arrow for arrow in arrows("tests") if is_in(arrow[1], "bench", "examples", *names)]
    assert wrong == []
