"""All kernels assemble for AMD GPUs, where barriers do not order accesses to global memory, so threads wait.
No kernel has been run on such a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gckernels.toolkit.kernels.launch import Launch
from harness.machine_code.aot import AMD
from processes import output_of

EXPECTED = {"_encode_kernel", "_encode_batch_kernel", "_decode_batch_kernel", "_accumulate_kernel", "_decode_kernel"}
EXPECTED |= {"_multiply_kernel", "_solve_kernel", "_replace_kernel", "_keep_kernel"}
EXPECTED |= {"_mark_kernel", "_list_kernel", "_digit_kernel", "_emit_kernel", "_select_kernel", "_write_kernel"}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("architecture", AMD)
def test_kernels_assemble_without_spills_and_wait_before_they_exchange(architecture):
    found = json.loads(output_of(Path(__file__).with_name("amd_kernels.py"), architecture))
    assert {record["kernel"] for record in found} >= EXPECTED
    assert all(record["counts"] == 1 for record in found), "the assembly has no count of spilled registers"
    spilled = [record for record in found if record["spilled"]]
    assert not spilled, "\n".join(map(str, spilled))
    waiting = {record["kernel"] for record in found if record["waits"]}
    assert {"_accumulate_kernel", "_decode_kernel"} <= waiting
    assert {record["kernel"] for record in found if record["exchanges"]} == waiting
    # a program of one wave needs no barrier
    unordered = [each for each in found if each["waits"] != each["waiting_barriers"] and each["num_warps"] > 1]
    assert not unordered, "\n".join(map(str, unordered))


def test_limits_of_registers_are_for_nvidia_alone():
    launch = Launch(None, (1,), (), {}, maxnreg=128)
    assert launch.options_for("cuda")["maxnreg"] == 128
    assert "maxnreg" not in launch.options_for("hip")
