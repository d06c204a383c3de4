"""A search with many tensors and all programs needs little memory."""

from __future__ import annotations

import pytest

from processes import output_of

SEARCH = """
from pathlib import Path

import gckernels
from gckernels.planner.choice import POLICIES
from gckernels.planner.drafts.problem import Problem
from gckernels.planner.machines.files import load_machine
from gckernels.planner.timeline.pricing import Pricer
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.programs import Place
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import TracedTensor

sizes = [(64 + index) * (256 + index) for index in range(1000)]
ready_s = [0.1 * (index + 1) / 1000 for index in range(1000)]
tensors = tuple(TracedTensor(f"t{index}", *each) for index, each in enumerate(zip(sizes, ready_s, strict=True)))
trace = ModelTrace("tensors", tensors, 0.1, 0.05)
allowed = {tensor.name: (gckernels.EFSignSGD(),) for tensor in tensors}
pricer = Pricer(load_machine("espresso-nvlink"))
POLICIES["auto"](Problem(trace, pricer, Frontend.MODULE, allowed, (Place.DEVICE, Place.HOST)))
# ru_maxrss would have the memory of the process that started this one as well
print(*(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_tensors_and_programs_need_little_memory():
    """1000 tensors, 4341 options on 64 devices."""
    assert int(output_of("-c", SEARCH)) / 1024 < 500
