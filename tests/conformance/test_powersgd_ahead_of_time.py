"""The kernels of PowerSGD compile for all targets and spill no registers."""

from __future__ import annotations

import json

import pytest

from gckernels.testing.aot import TARGETS
from processes import output_of

COMPILE = """
import json, sys
import torch
from gckernels.testing.launches import launches_of_powersgd
from gckernels.testing.aot import compile_launches

dtypes = (torch.float32, torch.bfloat16)
targets, ranks = map(json.loads, sys.argv[1:])
recorded = [each for rank in ranks for dtype in dtypes for each in launches_of_powersgd(dtype, 100, 300, rank)]
work = [(launch, capability) for capability in targets for launch in recorded]
found = [
    (each.kernel, str(launch.constexprs), capability, each.stack_nbytes, each.local_loads + each.local_stores)
    for (launch, capability), each in zip(work, compile_launches(work))
]
json.dump(found, sys.stdout)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("targets", "ranks"),
    [((90,), (32,)), pytest.param(TARGETS, (4, 32), marks=pytest.mark.slow)],  # with rank 32 most registers are needed
)
def test_kernels_compile_without_spills(targets, ranks):
    found = json.loads(output_of("-c", COMPILE, json.dumps(targets), json.dumps(ranks)))
    assert len({name for name, *_ in found}) == 10 and {capability for _, _, capability, *_ in found} == {*targets}
    spilled = [row for row in found if row[3]]
    assert not spilled, "\n".join(map(str, spilled))
