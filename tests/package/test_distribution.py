"""The source distribution is complete, and the wheel works wherever Python is started."""

from __future__ import annotations

import os
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
from gckernels import sync
compressor = gckernels.EFSignSGD()
payload = torch.empty(compressor.payload_nbytes(1000), dtype=torch.uint8)
compressor.encode(torch.randn(1000), None, payload)
print(gckernels.__file__, sync.__file__)
"""


def _run(*command: str, cwd: Path, **environment: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    finished = subprocess.run(
        command, cwd=cwd, env=kept | environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert finished.returncode == 0, finished.stdout[-2000:] + finished.stderr[-2000:]
    return finished.stdout


@pytest.fixture(scope="module")
def archives(tmp_path_factory) -> tuple[Path, Path]:
    """The source distribution, made from a copy of the checkout, and the wheel made from it."""
    folder = tmp_path_factory.mktemp("distribution")
    left_out = shutil.ignore_patterns(
        ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis"
    )
    shutil.copytree(ROOT, folder / "checkout", ignore=left_out, symlinks=True)
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), cwd=folder / "checkout")
    (source,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return source, wheel


def _sources(pattern: str) -> set[str]:
    """The files of the package in the checkout, under the names that they have when installed."""
    found = {str(path.relative_to(ROOT)) for path in (ROOT / "gckernels").rglob(pattern)}
    found |= {f"gckernels/{path.relative_to(ROOT)}" for path in (ROOT / "sync").rglob(pattern)}
    return found


def test_the_wheel_has_every_file_of_the_package(archives):
    names = set(zipfile.ZipFile(archives[1]).namelist())
    suffixes = ("*.py", "*.c", "*.json", "*.css", "*.js")
    wanted = set().union(*map(_sources, suffixes)) | {"gckernels/py.typed"}
    assert len(wanted) > 100 and "gckernels/sync/planner/shipped/machines/lab.json" in wanted
    assert wanted <= names
    assert all(name.split("/")[0].startswith("gckernels") for name in names)


def test_the_source_distribution_has_every_file_of_the_repository(archives):
    with tarfile.open(archives[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        str(path.relative_to(ROOT))
        for folder in ("bench", "docs", "examples", "gckernels", "sync", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.is_relative_to(ROOT / "bench/results/cuda")
    }
    wanted = {name for name in wanted if not name.startswith("gckernels/sync/")}  # a link to sync/
    wanted |= {
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "README.md",
        "constraints.txt",
        "pyproject.toml",
    }
    assert wanted <= names


def test_the_wheel_works_elsewhere(archives, tmp_path):
    _run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(tmp_path), str(archives[1]), cwd=tmp_path)
    printed = _run(sys.executable, "-c", TRIES, cwd=tmp_path.parent, PYTHONPATH=str(tmp_path))
    assert all(name.startswith(str(tmp_path)) for name in printed.split())


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
    printed = _run(sys.executable, "-c", TRIES, cwd=ROOT)
    assert all(name.startswith(str(ROOT)) for name in printed.split())
