"""On AMD GPUs, casts, element-wise quantisers and PowerSGD assemble, and kernels that would race are refused. No kernel
has been run on such a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from configurations import DEFAULTS, parametrize

from gckernels.testing.launches import calls_of_one, has_batches
from gckernels.toolkit.kernels import launch as launching
from gckernels.toolkit.kernels.launch import Launch
from processes import output_of


@pytest.mark.parametrize("options", [["--quick"], pytest.param([], marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.timeout(900)
def test_casts_quantisers_and_powersgd_assemble_without_spills(options):
    found = json.loads(output_of(Path(__file__).with_name("amd_kernels.py"), *options))
    assert {"_multiply_kernel", "_solve_kernel", "_replace_kernel", "_keep_kernel"} <= {
        each["kernel"] for each in found
    }
    assert {"_partials_kernel", "_encode_kernel", "_decode_kernel", "_encode_batch_kernel", "_decode_batch_kernel"} <= {
        record["kernel"] for record in found
    }
    assert all(record["counts"] == 2 for record in found), "the assembly has no counts of spilled registers"
    spilled = [record for record in found if record["spilled"]]
    assert not spilled, "\n".join(map(str, spilled))


@parametrize(among=DEFAULTS)
def test_what_exchanges_through_memory_is_refused(compressor, monkeypatch):
    calls = calls_of_one(compressor, torch.float32, 100, 1, 2, accumulate=False)
    assert any(launch.exchanges for _, _, recorded in calls for launch in recorded) != has_batches(compressor)
    monkeypatch.setattr(launching, "BACKEND", "hip")
    for _, _, recorded in calls:
        for launch in recorded:
            if launch.exchanges:
                with pytest.raises(NotImplementedError, match=rf"{launch.kernel.__name__} does not run on AMD GPUs"):
                    launch.run()


def test_limits_of_registers_are_for_nvidia_alone():
    launch = Launch(None, (1,), (), {}, maxnreg=128)
    assert launch.options_for("cuda")["maxnreg"] == 128
    assert "maxnreg" not in launch.options_for("hip")
