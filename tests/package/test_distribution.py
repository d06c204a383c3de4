"""The source distribution is complete, and the wheel works wherever Python is started."""

from __future__ import annotations

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from network_namespaces import need_links

ROOT = Path(__file__).parents[2]
TRIES = """
import torch, gckernels
from gckernels import planner, sync
compressor = gckernels.EFSignSGD()
payload = torch.empty(compressor.payload_nbytes(1000), dtype=torch.uint8)
compressor.encode(torch.randn(1000), None, payload)
print(gckernels.__file__, sync.__file__, planner.__file__, sep="\\n")
"""
FINDS = """
from importlib import machinery, util
package = util.find_spec("gckernels")
print(package.origin)
for name in ("gckernels.sync", "gckernels.planner"):
    print(machinery.PathFinder.find_spec(name, package.submodule_search_locations).origin)
"""


def _run(*command: str, cwd: Path, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run(
        command, cwd=cwd, env=kept | environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    return finished.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A copy of the checkout without what was built in it."""
    left_out = shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
    )
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("distribution") / "check out", ignore=left_out, symlinks=True)


@pytest.fixture(scope="module")
def archives(checkout) -> tuple[Path, Path]:
    """The source distribution, and the wheel made from it."""
    pytest.importorskip("build", reason="needs the extra 'test'")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(checkout.parent), cwd=checkout)
    (source,), (wheel,) = checkout.parent.glob("*.tar.gz"), checkout.parent.glob("*.whl")
    return source, wheel


def _sources(pattern: str) -> set[str]:
    """The files of the package in the checkout, under the names that they have when installed."""
    found = {str(path.relative_to(ROOT)) for path in (ROOT / "gckernels").rglob(pattern)}
    for part in ("sync", "patches", "planner"):
        found |= {f"gckernels/{path.relative_to(ROOT)}" for path in (ROOT / part).rglob(pattern)}
    return found


def test_the_wheel_has_every_file_of_the_package(archives):
    names = set(zipfile.ZipFile(archives[1]).namelist())
    suffixes = ("*.py", "*.c", "*.json", "*.css", "*.js")
    wanted = set().union(*map(_sources, suffixes)) | {"gckernels/py.typed"}
    assert len(wanted) > 100 and "gckernels/planner/machines/shipped/lab.json" in wanted
    assert wanted <= names
    assert all(name.split("/")[0].startswith("gckernels") for name in names)


def test_the_source_distribution_has_every_file_of_the_repository(archives):
    # the tests may be run by another user than the owner of the checkout
    git = ("git", "-c", "safe.directory=*", "ls-files", "-z")
    listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False) if shutil.which("git") else None
    if listed is None or listed.returncode:
        pytest.skip("needs a clone and git, which lists the files of the repository")
    with tarfile.open(archives[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = {name for name in listed.stdout.split("\0") if name and (ROOT / name).exists()}
    assert {"conftest.py", "gckernels/sync", "gckernels/patches", "gckernels/planner"} <= tracked
    assert tracked - names == set()


@pytest.mark.slow
def test_tests_run_from_the_source_distribution(archives, tmp_path):
    with tarfile.open(archives[0]) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    link = "tests/package/test_dependencies.py::test_a_checkout_is_a_whole_package_wherever_it_lies"
    tests = ("tests/toolkit/test_bitpack.py", "--sample=1000", link)
    _run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, cwd=unpacked)


@pytest.mark.slow
def test_a_module_that_was_renamed_is_not_installed_again(archives, checkout, tmp_path):
    """Two installations from one checkout: the second has no module that only the first one found."""
    modules = checkout / "gckernels"
    for name in ("batch.py", "renamed.py"):
        (modules / "batch.py").rename(modules / name)
        folder = tmp_path / name
        folder.mkdir()
        code = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"  # as pip does
        _run(sys.executable, "-c", code, cwd=checkout)
    (wheel,) = folder.glob("*.whl")
    installed = {path for path in map(Path, zipfile.ZipFile(wheel).namelist()) if path.parent == Path("gckernels")}
    assert {path.name for path in installed} == {path.name for path in modules.iterdir() if path.is_file()}


def test_an_index_shows_a_description_without_dead_links(archives):
    with zipfile.ZipFile(archives[1]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        description = email.message_from_bytes(archive.read(name)).get_payload()
    assert "sync.attach(model)" in description and "docs/tutorials/automatic.md" in description
    targets = re.findall(r"\]\(([^)]*)\)|(?:src|href)=[\"']([^\"']*)", description)
    assert all(address.startswith("https://") for found in targets for address in found if address)
    assert "<!--" not in description and "![" not in description


@pytest.mark.slow
def test_the_wheel_works_elsewhere(archives, tmp_path):
    _run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(tmp_path), str(archives[1]), cwd=tmp_path)
    printed = _run(sys.executable, "-c", TRIES, cwd=tmp_path.parent, PYTHONPATH=str(tmp_path))
    assert all(Path(name).is_relative_to(tmp_path) for name in printed.splitlines())


@pytest.mark.slow
def test_the_lab_works_elsewhere(archives, tmp_path):
    """The switch that delays packets is a program of its own, which has to be found."""
    need_links()
    _run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(tmp_path), str(archives[1]), cwd=tmp_path)
    (tmp_path / "script.py").write_text("import os; open('rank' + os.environ['RANK'], 'w').close()")
    command = ("-m", "gckernels", "lab", "--rate", "100mbit", "--delay", "1ms", str(tmp_path / "script.py"))
    (tmp_path / "empty").mkdir()
    _run(sys.executable, *command, cwd=tmp_path / "empty", PYTHONPATH=str(tmp_path))
    assert {path.name for path in (tmp_path / "empty").iterdir()} == {"rank0", "rank1"}


def test_python_in_the_checkout_takes_the_checkout():
    """The checkout comes before installed packages on the path, so it must be a whole package."""
    printed = _run(sys.executable, "-c", FINDS, cwd=ROOT)
    assert len(printed.splitlines()) == 3
    assert all(Path(name).is_relative_to(ROOT) for name in printed.splitlines())
