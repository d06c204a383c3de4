"""Tests of the arguments that bound launches pass to a driver, and of the benchmark of their cost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_bound_launches_pass_the_right_arguments_to_a_driver():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = (ROOT, environment.get("PYTHONPATH"))
    environment["PYTHONPATH"] = os.pathsep.join(str(path) for path in paths if path)
    command = [sys.executable, str(Path(__file__).with_name("bound_launches.py"))]
    script = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert script.returncode == 0, script.stderr
    assert script.stdout.count("check_") == 5
