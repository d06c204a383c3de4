"""A training loads what it needs, and no more: the rest, and the planner, are imported when asked for."""

from __future__ import annotations

import json

import pytest

from processes import output_of

IMPORT, WITH_A_PLAN, TUNED, DECIDED = 18_700, 21_460, 23_980, 27_220
"""The largest number of lines that are loaded by the import of ``gckernels.sync``, by a step of a DDP model with a
plan, by one of a model that finds its plans, and when it has found them."""

SCRIPT = """
import json, os, sys

import torch
import torch._dynamo  # DDP imports it
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gckernels import sync

def loaded():
    modules = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "gckernels"}
    counts = {name: len(open(module.__file__).readlines()) for name, module in modules.items()}
    return {"lines": sum(counts.values()), "modules": sorted(counts)}

found = [loaded()]
rank = 1 if os.fork() == 0 else 0  # before torch has threads
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
for how in ("BlockQuant", sync.Auto()):
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    attachment = sync.attach(model, how)
    model(torch.ones(1, 8)).sum().backward()
    found.append(loaded())
    if isinstance(how, sync.Auto):
        while not attachment.decisions:
            model(torch.ones(1, 8)).sum().backward()
        found.append(loaded())
    attachment.close()
dist.destroy_process_group()
if rank:
    os._exit(0)
_, status = os.wait()
assert status == 0
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return json.loads(output_of("-c", SCRIPT, tmp_path_factory.mktemp("ranks") / "store", timeout_s=200))


def test_a_training_loads_few_lines(found):
    lines = [each["lines"] for each in found]
    assert all(count <= most for count, most in zip(lines, (IMPORT, WITH_A_PLAN, TUNED, DECIDED), strict=True)), lines


def test_other_front_ends_and_the_planner_are_not_loaded(found):
    _, planned, tuned, decided = (each["modules"] for each in found)
    later = tuple(f"gckernels.sync.frontends.{kind}" for kind in ("module", "sharded", "updates"))
    later += ("gckernels.planner", "gckernels.sync.tracing", "gckernels.sync.reporting")
    assert "gckernels.sync.frontends.ddp.ddp_frontend" in planned
    assert [name for name in planned if name.startswith((*later, "gckernels.sync.tuning.tun"))] == []
    assert [name for name in tuned if name.startswith((*later, "gckernels.sync.states.jobs"))] == []
    assert [name for name in decided if name.startswith("gckernels.planner")] == []


def test_kernels_and_the_back_ends_of_other_compressors_are_not_loaded(found):
    """On a CPU, where nothing but a quantiser has run."""
    _, planned, *_ = (each["modules"] for each in found)
    assert "gckernels.toolkit.quantizer.host" in planned
    assert [name for name in planned if "_kernels" in name or name.endswith(".kernels.launch_batch")] == []
    others = ("sparsifier", "chunktopk", "randomk")
    assert [name for name in planned if name.split(".")[-1] == "host" and name.split(".")[-2] in others] == []


NAMES = """
import importlib, pkgutil, sys, types

import gckernels

for package in [module for module in sys.modules.values() if module.__name__.startswith("gckernels")]:
    for each in pkgutil.iter_modules(getattr(package, "__path__", [])):
        is_loaded = f"{package.__name__}.{each.name}" in sys.modules
        if not (is_loaded or isinstance(getattr(package, each.name, package), types.ModuleType)):
            print(package.__name__, each.name)
"""


def test_no_module_that_is_imported_later_takes_the_name_of_something_else():
    """The import of a submodule sets the attribute of its package."""
    assert output_of("-c", NAMES, timeout_s=100).strip() == ""
