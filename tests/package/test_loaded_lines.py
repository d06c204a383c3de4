"""A training loads what it needs of ``sync/``, and no more: the rest, and the planner, are imported when asked for."""

from __future__ import annotations

import json

import pytest

from processes import output_of

IMPORT, WITH_A_PLAN, TUNED, DECIDED = 12_320, 13_740, 15_150, 18_880
"""The largest number of lines of ``sync/`` that are loaded by the import of ``gckernels.sync``, by an attachment of a
DDP model with a plan, by one that finds its plans, and when it has found them."""

SCRIPT = """
import json, os, sys

import torch
import torch._dynamo  # DDP imports it
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gckernels import sync

def loaded():
    parts = ("gckernels.sync", "gckernels.planner")
    modules = {name: module for name, module in sys.modules.items() if name.startswith(parts)}
    counts = {name: len(open(module.__file__).readlines()) for name, module in modules.items()}
    return {"lines": sum(counts.values()), "modules": sorted(counts)}

found = [loaded()]
rank = 1 if os.fork() == 0 else 0  # before torch has threads
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
for plan in (("BlockQuant",), ()):
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    attachment = sync.attach(model, *plan)
    found.append(loaded())
    if not plan:
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
    later = ("module", "sharded", "updates")
    unused = [f"gckernels.sync.frontends.{kind}" for kind in later]
    unused += ["gckernels.planner", "gckernels.sync.tracing", "gckernels.sync.reporting"]
    assert "gckernels.sync.frontends.ddp.ddp_frontend" in found[-2]["modules"]
    assert [name for name in found[-1]["modules"] if name.startswith("gckernels.planner")] == []
    assert [name for name in found[-2]["modules"] if name.startswith((*unused, "gckernels.sync.states.jobs"))] == []
    assert [name for name in found[1]["modules"] if name.startswith("gckernels.sync.tuning.tun")] == []
