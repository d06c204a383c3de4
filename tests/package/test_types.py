"""Tests of type checking code that uses the package: correct calls pass, and every typo is an error."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = """
import torch
from torch.nn.parallel import DistributedDataParallel

import gckernels
from gckernels import EFSignSGD, PowerSGD, TopK, encode, sync
from gckernels import TpoK  # error: no attribute "TpoK"

grad, residual = torch.zeros(4, 6), torch.zeros(4, 6)
payload: torch.Tensor = gckernels.encode(gckernels.BlockQuant(bits=4), grad, residual, seed=3)
decoded: torch.Tensor = gckernels.decode(EFSignSGD(block=1024), payload, grad.shape, out_dtype=torch.float16)
recoded: torch.Tensor = gckernels.recode(TopK(ratio=0.1), payload[None], None, 24)
encode(TopK(), grad, size=gckernels.chunk_numel(24, 2), chunks=2)
print(PowerSGD(rank=2).name, gckernels.CODECS, gckernels.__version__)

gckernels.tpok_encode(grad)  # error: no attribute "tpok_encode"
gckernels.EFSignSDG()  # error: no attribute "EFSignSDG"
gckernels.encode(TopK(), grad, bitz=4)  # error: keyword argument "bitz"
gckernels.decode(TopK(), payload, 24, sizes=24)  # error: keyword argument "sizes"
gckernels.encode(TopK, grad)  # error: incompatible type "type[TopK]"
gckernels.encode("TopK", grad)  # error: incompatible type "str"
gckernels.encode(PowerSGD(), grad)  # error: incompatible type "PowerSGD"
gckernels.BlockQuant(bitz=4)  # error: keyword argument "bitz"
gckernels.BlockQuant(bits="4")  # error: incompatible type "str"
TopK().ration  # error: no attribute "ration"


def attached(ddp_model: DistributedDataParallel, module: torch.nn.Module) -> None:
    plan: sync.Plan = sync.uniform_plan(ddp_model, "TopK", program="alltoall", exempt=["0.bias"], topology=(2, 4))
    sync.uniform_plan(module.named_parameters(), TopK(), program=sync.programs.ring(8), exempt=None, world_size=8)
    sync.attach(ddp_model, plan, start_step=100).close()
    sync.attach(ddp_model, EFSignSGD(), seed=1)
    sync.attach(ddp_model, sync.Auto(accuracy="aggressive", steps=10_000)).report("report.html")
    sync.attach(module, "TopK(ratio=0.1)", bucket_cap_mb=10)
    sync.attach(module)

    sync.attach()  # error: Missing positional argument "model"
    sync.attach(ddp_model, EFSignSGD)  # error: incompatible type "type[EFSignSGD]"
    sync.attach(module, plan, accuracy="safe")  # error: keyword argument "accuracy"
    sync.attach(ddp_model, "TopK", program="alltoall")  # error: keyword argument "program"
    sync.attach(module, "TopK", exempt=None)  # error: keyword argument "exempt"
    sync.uniform_plan(ddp_model, "TopK", progam="alltoall")  # error: keyword argument "progam"
    sync.uniform_plan(ddp_model, "TopK", topology=8)  # error: incompatible type "int"
"""


@pytest.mark.slow  # without a cache mypy reads all of torch; `make check` reads the package itself
def test_typos_are_errors_of_the_type_checker(tmp_path):
    pytest.importorskip("mypy")
    file = tmp_path / "code.py"
    file.write_text(CODE)
    # in the checkout's folder: its pyproject.toml, and its cache, so that the package is read once
    command = [sys.executable, "-m", "mypy", "--strict", "--hide-error-context", "--no-error-summary", str(file)]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    output = checked.stdout
    assert not checked.stderr
    errors = {int(line): text for line, text in re.findall(r"code\.py:(\d+): error: (.*)", output)}
    lines = dict(enumerate(CODE.splitlines(), start=1))
    assert errors.keys() == {number for number, line in lines.items() if "# error: " in line}, output
    for number, text in errors.items():
        assert lines[number].partition("# error: ")[2] in text
