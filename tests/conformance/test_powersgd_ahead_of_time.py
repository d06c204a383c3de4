"""The kernels of PowerSGD compile for all targets and spill no registers."""

from __future__ import annotations

import json

import pytest

from harness.machine_code.aot import TARGETS
from processes import output_of

PRODUCTS = ("_left_kernel", "_right_kernel", "_reconstruct_kernel")
COMPILE = """
import json, sys
import torch
from harness.machine_code.launches import launches_of_powersgd
from harness.machine_code.aot import compile_launches

targets, ranks, names = map(json.loads, sys.argv[1:])
dtypes = [getattr(torch, name) for name in names]
recorded = [each for rank in ranks for dtype in dtypes for each in launches_of_powersgd(dtype, 100, 300, rank)]
work = [(launch, capability) for capability in targets for launch in recorded]
found = [
    (
        *(each.kernel, str(launch.constexprs), capability, each.stack_nbytes, each.local_loads + each.local_stores),
        max([access.nbytes for access in each.accesses if access.kind == "load"]),
    )
    for (launch, capability), each in zip(work, compile_launches(work))
]
json.dump(found, sys.stdout)
"""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("targets", "ranks", "dtypes"),
    [
        pytest.param((90,), (32,), ("float32",), marks=pytest.mark.slow),  # with rank 32 most registers are needed
        pytest.param(TARGETS, (4, 32), ("float32", "bfloat16"), marks=pytest.mark.slow),
    ],
    ids=["some", "all"],
)
def test_kernels_compile_without_spills(targets, ranks, dtypes):
    found = json.loads(output_of("-c", COMPILE, *map(json.dumps, (targets, ranks, dtypes))))
    assert len({name for name, *_ in found}) == 10 and {capability for _, _, capability, *_ in found} == {*targets}
    # on sm_80 and sm_100 some loads go to shared memory directly, which are not among the accesses
    kinds = ("'NARROW': True", "'HAS_RESIDUAL': True")
    narrow = [row for row in found if row[0] in PRODUCTS and row[2] == 90 and all(kind in row[1] for kind in kinds)]
    assert bool(narrow) == (4 in ranks) and all(row[5] == 16 for row in narrow), (
        "matrices are loaded 16 bytes at a time"
    )
    spilled = [row for row in found if row[3]]
    assert not spilled, "\n".join(map(str, spilled))
