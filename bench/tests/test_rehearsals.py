"""Rehearsals: measurements without ranks and links run with tiny sizes, and write their rows."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
import torch.distributed as dist

from bench.lib import resnet50
from bench_runs import rows_of
from processes import output_of

SMALL: dict[str, tuple[dict[str, object], list[str], int]] = {
    "kernels.batch": ({"SPECS": ("BlockQuant",), "ROUNDS": 2, "WARM_UP": 0}, [], 8),
    "kernels.patches": ({"RATES": (1e-6, 1e-4), "NUMEL": 3000, "ROUNDS": 2}, [], 2),
    "kernels.powersgd": ({"SHAPES": ((64, 32),), "RANKS": (4,), "ROUNDS": 2}, [], 2),
    "kernels.topk": ({"SPECS": ("TopK", "ChunkTopK"), "NUMEL": 1000, "ROUNDS": 2}, [], 4),
    "sync.build_time": ({"LAYERS": 1, "HIDDEN": (16,), "REPETITIONS": 1}, [], 5),
}
"""By module: its constants that are replaced, its arguments, and the number of its rows."""


@pytest.mark.parametrize("name", SMALL)
def test_rows_are_written(monkeypatch, out, name):
    module, (constants, arguments, count) = importlib.import_module(f"bench.{name}"), SMALL[name]
    for constant, value in constants.items():
        monkeypatch.setattr(module, constant, value)
    monkeypatch.setattr(resnet50, "sizes", lambda: iter((1000, 2**15)))
    threads = [2]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(sys, "argv", [f"bench.{name}", *arguments])
    if hasattr(module, "SWEEP"):
        module.SWEEP.main(module.__doc__)
    else:
        module.main()
    (path,) = out.glob("*.csv")
    rows = rows_of(path)
    assert path.stem == name.partition(".")[2] and len(rows) == count
    assert not dist.is_initialized()


LAUNCHES = """
import sys

sys.modules |= dict.fromkeys(("pytest", "matplotlib"))  # the machine with the GPU may lack them
from bench.kernels import gpu_kernels, launch_cost
from harness import fake_driver

fake_driver.install()
for row in launch_cost.rows(("Cast16", "TopK", "PowerSGD"), rounds=1, calls=1):
    assert float(row["bound_us"]) > 0 and float(row["unbound_us"]) > 0
    print(row["units"], row["launches"], sep=";")
"""


def test_the_cost_of_launches_is_measured_without_what_a_gpu_machine_lacks():
    """Runs in a process that does not interpret kernels."""
    rows = [line.split(";") for line in output_of("-c", LAUNCHES).splitlines()]
    of_one = [int(launches) for units, launches in rows if units != "ResNet-50"]
    assert of_one == [1, 1, 1, 1, 11, 3, 11, 3, 10, 1, 10, 1]
    of_many = [int(launches) for units, launches in rows if units == "ResNet-50"]
    assert len(of_many) == 6 and max(of_many) < len(list(resnet50.shapes()))
