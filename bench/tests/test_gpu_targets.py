"""Tests of the GPU targets, rehearsed without a GPU: budgets, parts, and final summaries."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from bench.gpu import parts as parts_module
from bench.gpu.parts import Part, Result, run_apart
from bench.lib.budget import Budget
from bench_runs import rows_of

ROOT = Path(__file__).parents[2]
LIGHT_FILES = {"bandwidth.csv", "bits.csv", "compiled.csv", "gpu_light.log", "gpu_light.txt", "machine.json"}
BENCH_FILES = {
    "batch.csv",
    "compiled.csv",
    "gpu_bench.log",
    "gpu_bench.txt",
    "microbench.csv",
    "powersgd.csv",
    "topk.csv",
}


# -------------------------------------------------------------------- budgets


def test_a_budget_remembers_what_did_not_fit():
    budget = Budget(50)
    assert budget.allows("small", 10) and not budget.allows("large", 60) and budget.left_out == ["large"]
    assert 40 < budget.left_s <= 50
    spent = Budget(-1)
    assert spent.left_s == 0 and not spent.allows("anything") and spent.left_out == ["anything"]


def test_a_child_process_has_its_parents_deadline(monkeypatch):
    for name, value in Budget(50).environment().items():
        monkeypatch.setenv(name, value)
    assert 40 < Budget.of_this_process().left_s <= 50


# -------------------------------------------------------------------- parts


SCRIPT = """
    import os, subprocess, sys, time
    sys.path.insert(0, {root!r})
    from bench.lib.budget import Budget
    from bench.gpu.parts import Part, Result, main

    def good(budget):
        print("not for the terminal")
        budget.allows("the rest", 1e9)
        return Result(True, ["all is well", "a detail"])

    def bad(budget):
        return Result(False, ["it is wrong"])

    def dies(budget):
        raise KeyError("what it says")

    def hangs(budget):
        child = subprocess.Popen(["sleep", "100"])
        print("child", child.pid)
        time.sleep(100)

    PARTS = (
        Part("good", good, 20, min_s=0),
        Part("bad", bad, 20, min_s=0),
        Part("dies", dies, 20, min_s=0),
        Part("hangs", hangs, 0.5, min_s=0),
        Part("long", good, 1000, min_s=500),
        Part("other", good, 20, on_request=True),
    )
    if __name__ == "__main__":
        sys.exit(main("target", PARTS, 100))
"""


@pytest.mark.slow
def test_parts_end_in_time_and_are_summarised_last(tmp_path, out, monkeypatch, capsys, in_background):
    script = tmp_path / "target.py"
    script.write_text(textwrap.dedent(SCRIPT.format(root=str(ROOT))))
    monkeypatch.setattr(sys, "argv", [str(script)])
    monkeypatch.setattr(parts_module, "GRACE_S", 2.0)

    def unused(budget: Budget) -> Result:
        raise AssertionError("a part must run in a separate process")

    names = {"good": 20.0, "bad": 20.0, "dies": 20.0, "hangs": 4.0, "long": 1000.0}
    parts = [Part(name, unused, max_s, 500.0 if name == "long" else 0.0) for name, max_s in names.items()]
    assert run_apart("target", parts, 100) == 1
    table = (out / "target.txt").read_text()
    printed = capsys.readouterr().out
    assert printed.endswith(table)
    found = [re.split(r"  +", line.replace(" s  ", "  ")) for line in table.splitlines()]
    assert [(each[0], each[1], each[3]) for each in found] == [
        ("good", "ok", "all is well"),
        ("bad", "failed", "it is wrong"),
        ("dies", "failed", "KeyError: 'what it says'"),
        ("hangs", "too long", "KeyboardInterrupt"),
        ("long", "left out", found[4][3]),
    ]
    assert "a detail" in printed and "left out for lack of time: the rest" in printed
    assert "not for the terminal" not in printed
    log = (out / "target.log").read_text()
    assert "not for the terminal" in log
    child = int(re.search(r"child (\d+)", log).group(1))
    state = Path(f"/proc/{child}/status")
    assert not state.exists() or "zombie" in state.read_text()  # if nobody waits for orphans


def test_parts_can_be_chosen(tmp_path, out):
    script = tmp_path / "target.py"
    script.write_text(textwrap.dedent(SCRIPT.format(root=str(ROOT))))

    def printed(*arguments: str) -> str:
        command = [sys.executable, str(script), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False).stdout

    assert printed("--only", "other").splitlines()[1:3] == ["=== summary", "all is well"]
    assert (
        "unknown parts none"
        in subprocess.run(
            [sys.executable, str(script), "none"], capture_output=True, text=True, timeout=100, check=False
        ).stderr
    )


# -------------------------------------------------------------------- whole targets


def rehearse(out: Path, target: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """The output of a target that is run with a fake GPU, tiny sizes, and interpreted kernels."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = os.environ | {"BENCH_OUT": str(out), "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"} | (environment or {})
    command = [sys.executable, "-m", "bench.tests.rehearsal", target, *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=280, check=False).stdout


@pytest.mark.slow
def test_gpu_light(tmp_path, tool):
    tool("nvidia-smi", 'case "$1" in *compute_cap*) echo 9.0;; *) echo 580.1, 3201;; esac')
    tool("compute-sanitizer", 'while [ "$1" != --print-limit ]; do shift; done; shift 2; exec "$@"')
    printed = rehearse(tmp_path / "out", "light")
    table = (tmp_path / "out" / "gpu_light.txt").read_text()
    assert printed.endswith(table)
    assert [line.split()[:2] for line in table.splitlines()] == [
        [part, "ok"] for part in ("machine", "compile", "bits", "memcheck", "bandwidth")
    ]
    assert {path.name for path in (tmp_path / "out").iterdir()} == LIGHT_FILES
    assert all(not row["error"] for row in rows_of(tmp_path / "out" / "compiled.csv"))
    checked = rows_of(tmp_path / "out" / "bits.csv")
    assert {row["agree"] for row in checked} == {"yes"}
    bound = {f"bound {call}codes with feedback in {kind}" for call in ("en", "re") for kind in ("fp32", "8 bits")}
    assert {row["call"] for row in checked} >= {*bound, "bound decodes 3", "reconstruct", "encode"}
    assert {(row["driver"], row["memory_clock_mhz"]) for row in checked} == {("580.1", "3201")}


@pytest.mark.slow
def test_a_kernel_that_ends_its_process_costs_its_own_configuration(tmp_path):
    printed = rehearse(tmp_path, "light", "--only", "bits", environment={"FAULTS": "1"})
    assert "10 of 12 calls agree, 2 configurations have wrong calls\nDies: 1\nBreaks: 1\n" in printed


@pytest.mark.slow
def test_gpu_bench(tmp_path):
    printed = rehearse(tmp_path, "bench")
    table = (tmp_path / "gpu_bench.txt").read_text()
    assert printed.endswith(table)
    names = ["compile", "kernels", "topk", "peers", "batch", "powersgd"]
    assert [line.split()[:2] for line in table.splitlines()] == [[name, "ok"] for name in names]
    assert {path.name for path in tmp_path.iterdir()} == BENCH_FILES
    rows = rows_of(tmp_path / "microbench.csv")
    assert {row["note"] for row in rows} == {""}
    assert {(row["direction"], row["sources"], row["dtype"]) for row in rows} >= {
        ("encode", "1", "bfloat16"),
        ("decode", "8", "bfloat16"),
        ("recode", "8", "float32"),
    }
    assert all(row["driver"] == "" and row["sm_clock_mhz"] == "1980" for row in rows)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("target", "script"),
    [
        ("gpu-light", "light"),
        ("test-gpu", "tests"),
        ("test-gpu-nccl", "nccl"),
        ("bench-gpu", "bench"),
    ],
)
def test_make_hands_over_the_folder_and_the_parts(target, script, tmp_path):
    folder = tmp_path / "a folder"
    command = ["make", "--dry-run", target, f"OUT={folder}", "PARTS=one two", "PYTHON=python"]
    # if make runs the tests, it passes on its own flags and depth
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    *_, last = run.stdout.splitlines()
    assert f'BENCH_OUT="{folder}"' in last and last.endswith(f"python -m bench.gpu.{script} one two")
    assert (ROOT / "bench" / "gpu" / f"{script}.py").exists()
