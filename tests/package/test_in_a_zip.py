"""The package can be imported from a zip file, with its C texts, its page and its descriptions of machines."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

from processes import output_of

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys

sys.path.insert(0, sys.argv[1])
import torch

import gckernels
from gckernels.planner.machines.files import load_machine, machine_names
from gckernels.sync.reporting import page

assert gckernels.__file__.startswith(sys.argv[1]), gckernels.__file__
for spec in ("BlockQuant", "TopK", "ChunkTopK", "RandomK", "Cast16"):
    method = gckernels.from_spec(spec)
    residual = torch.zeros(5000) if method.traits.needs_feedback else None
    assert gckernels.decode(method, gckernels.encode(method, torch.randn(5000), residual), 5000).isfinite().all()
gckernels.from_spec("PowerSGD").compile_host()
assert all(load_machine(name) for name in machine_names())
assert page.__file__.startswith(sys.argv[1])
"""


def test_everything_is_read_from_the_zip_file(tmp_path):
    path = tmp_path / "gckernels.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for folder, _, names in os.walk(ROOT / "gckernels", followlinks=True):
            for name in names:
                if not name.endswith(".pyc"):
                    archive.write(Path(folder, name), Path(folder, name).relative_to(ROOT))
    output_of("-P", "-c", SCRIPT, path, timeout_s=200)
