"""Every launch of every configuration lowers to Triton's GPU IR, in sizes whose counts are 0, 1 or odd. This holds for
the oldest and the newest release of Triton that the package allows."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import triton
from packaging.requirements import Requirement

import gckernels.ops
import gckernels.toolkit
from processes import ROOT, output_of


def scan(*options: str, release: Path | None = None) -> dict[str, Any]:
    """The output of ``launch_scan.py`` with Triton from the folder ``release``, or with the installed Triton."""
    script = Path(__file__).with_name("launch_scan.py")
    return json.loads(output_of(script, *options, paths=[release] if release else []))


def check(found: dict[str, Any]) -> None:
    """Assert that every kernel lowers and that no count has become a constant."""
    missing = kernels() - set(found["functions"])
    assert not missing, f"not launched in any size: {sorted(missing)}"
    assert not found["failures"], "\n".join([f"with Triton {found['triton']}:", *found["failures"]])
    assert not found["constants"], "\n".join(["constants where an argument is 1:", *found["constants"]])


def kernels() -> set[str]:
    """The full names of all kernels of this package."""
    found = set()
    for package in (gckernels.ops, gckernels.toolkit):
        for each in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(each.name)
            found |= {
                f"{each.name}.{name}"
                for name, value in vars(module).items()
                if name.startswith("_") and name.endswith("_kernel") and value.fn.__module__ == each.name
            }
    return found


@pytest.mark.slow
def test_every_kernel_lowers_for_one_element():
    check(scan("--quick"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_launch_lowers():
    check(scan())


def allowed() -> Requirement:
    """The requirement on Triton in ``pyproject.toml``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (found,) = (each for each in map(Requirement, project["dependencies"]) if each.name == "triton")
    return found


def oldest() -> str:
    (bound,) = (each.version for each in allowed().specifier if each.operator == ">=")
    return f"triton=={bound}"


def newest() -> str:
    return f"triton{allowed().specifier}"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("requirement", [oldest(), newest()], ids=["oldest", "newest"])
def test_every_launch_lowers_with_other_releases(requirement, tmp_path_factory, request):
    release = tmp_path_factory.mktemp("triton")
    request.addfinalizer(lambda: subprocess.run(["rm", "-r", str(release)], check=False))
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(release), requirement]
    pip = subprocess.run(command, capture_output=True, text=True, check=False)
    if pip.returncode and "from versions: none" in pip.stderr:
        pytest.skip(f"no package index within reach to install {requirement} from")
    assert pip.returncode == 0, pip.stderr
    found = scan(release=release)
    assert (found["triton"] == triton.__version__) == (release / f"triton-{triton.__version__}.dist-info").exists()
    check(found)
