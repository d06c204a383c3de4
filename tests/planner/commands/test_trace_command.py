"""The verb ``trace``: an unchanged script is run and recorded, and ends early."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from gckernels.planner import commands
from gckernels.sync import ModelTrace

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

dist.init_process_group("gloo")
print("arguments", sys.argv[1:], __name__)
steps = int(sys.argv[1])
model = DDP(torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 5)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if steps < 0:
    raise KeyError("on purpose")
done = 0
try:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
        done += 1
finally:
    print("steps", done)
print("the end")
"""
DEFAULTS = ("--steps", "3", "--warmup", "2", "--compressors", "BlockQuant", "--compressors", "EFSignSGD")


@pytest.fixture
def script(tmp_path, monkeypatch):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    return str(path)


def test_an_unchanged_script_is_recorded_and_ended(script, capfd):
    before = os.environ.get("RANK"), list(sys.path), DistributedDataParallel.__init__
    code = commands.main(["trace", *DEFAULTS, script, "-o", "out.json", "50", "-o", "mine"])
    assert (os.environ.get("RANK"), sys.path, DistributedDataParallel.__init__) == before
    printed, notes = capfd.readouterr()
    assert code == 0, notes
    assert "arguments ['50', '-o', 'mine'] __main__" in printed
    assert "steps 5\n" in printed and "the end" not in printed
    trace = ModelTrace.load("out.json")
    assert trace.model == "Sequential" and len(trace.tensors) == 4 and len(trace.buckets) == 1
    for part in ("4 tensors, 1,385 elements", "backward", "last gradient ready", "BlockQuant", "EFSignSGD"):
        assert part in printed, part
    assert "gckernels plan out.json" in notes and "is given to" not in notes
    assert not torch.distributed.is_initialized()


def test_results_alone_go_to_stdout(script, capfd):
    assert commands.main(["trace", *DEFAULTS, "--name", "mine", "--go-on", "--json", script, "8"]) == 0
    printed, notes = capfd.readouterr()
    record = json.loads(printed)
    assert (record["model"], record["tensors"], record["buckets"]) == ("mine", 4, 1)
    assert record["last_ready_s"] == record["backward_s"] > 0
    assert 0 < record["errors"]["BlockQuant(bits=8, block=256, scale_dtype=torch.float32)"] < 0.1
    assert "steps 8" in notes and "the end" in notes


def test_the_trace_of_a_module_can_go_to_stdout(script, capfd):
    assert commands.main(["trace", *DEFAULTS, "-m", "train", "--output", "-", "--", "9"]) == 0
    printed, notes = capfd.readouterr()
    assert json.loads(printed)["format"] == "gckernels trace"
    assert "arguments ['9']" in notes and "4 tensors" in notes


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["4", "-o", "out.json"], "-o out.json"),
        (["4", "-oout.json", "--json"], "-oout.json, --json"),
        (["4", "--output=out.json", "--name", "mine"], "--output=out.json, --name mine"),
        (["--", "4", "-o", "out.json"], None),
        (["4", "--lr", "1", "-m", "old"], None),
    ],
)
def test_options_that_the_script_gets_are_noted(script, capfd, arguments, options):
    """They stand behind its own arguments, where only the script could know them."""
    commands.main(["trace", *DEFAULTS, script, *arguments])
    printed, notes = capfd.readouterr()
    assert f"arguments {[each for each in arguments if each != '--']}" in printed
    assert ("is given to" in notes) == (options is not None)
    assert options is None or f"gckernels trace: {options} is given to {script}, " in notes


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["4"], 3, "train.py: 1 of 3 steps are recorded; let it train 6 steps"),
        (["-1"], 3, r"train.py failed with KeyError: 'on purpose': 0 of 3 steps"),
        (["x"], 3, "train.py failed with ValueError"),
    ],
)
def test_scripts_that_end_too_early(script, capfd, arguments, code, message):
    assert commands.main(["trace", *DEFAULTS, "--warmup", "3", script, "-o", "out.json", *arguments]) == code
    assert message in capfd.readouterr().err
    assert not os.path.exists("out.json")


def test_wrong_use(tmp_path, script, capfd):
    empty = tmp_path / "empty.py"
    empty.write_text("")
    wrong = (
        ([str(empty)], 3, "has made no DistributedDataParallel model, and trained none of fully_shard; wrap its model"),
        (["missing.py"], 2, "missing.py: there is no such file"),
        (["-m", "missing.train"], 2, "-m missing.train: there is no module 'missing' here"),
        (["--steps", "0", script], 2, "--steps must be an integer from 1 up, got 0"),
        (["--compressors", "Nothing", script], 2, "unknown name 'Nothing'"),
        ([script, "-o", "missing/out.json"], 2, "there is no folder missing"),
        ([], 2, "script"),
    )
    for arguments, code, message in wrong:
        assert commands.main(["trace", *arguments]) == code, arguments
        assert message in capfd.readouterr().err


@pytest.mark.slow
def test_all_ranks_of_torchrun_are_recorded(script):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "gckernels",
    ]
    ran = subprocess.run(
        [*command, "trace", *DEFAULTS, script, "-o", "out.json", "50"],
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("last gradient ready") == 1 and "the end" not in ran.stdout
    assert "2 ranks" in ModelTrace.load("out.json").source
