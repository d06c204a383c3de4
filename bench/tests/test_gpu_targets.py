"""Tests of the GPU targets, rehearsed without a GPU: budgets, parts, checks, and final summaries."""

from __future__ import annotations

import csv
import importlib
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
import unittest.mock
from pathlib import Path

import pytest
import torch

from bench.gpu import bandwidth, bits, compilation, memcheck, pytest_runs
from bench.gpu import parts as parts_module
from bench.gpu.parts import Part, Result, run_apart
from bench.kernels import gpu_kernels
from bench.lib import nvidia_smi
from bench.lib.budget import Budget
from bench.lib.card import Card
from bench.lib.cases import BOUND, COMPILED, EAGER, FUSED, Case
from bench.lib.timings import Recorder
from bench.tests import fake_cuda
from gckernels import EFSignSGD
from gckernels.toolkit.kernels.launch import Launch
from gckernels.toolkit.quantizer import QuantizerHost
from processes import output_of

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


@pytest.fixture
def out(monkeypatch, tmp_path):
    """The results folder."""
    monkeypatch.setenv("BENCH_OUT", str(tmp_path / "out"))
    return tmp_path / "out"


@pytest.fixture
def cuda():
    """The fake GPU."""
    nvidia_smi._once.cache_clear()
    with fake_cuda.installed():
        yield
    nvidia_smi._once.cache_clear()


@pytest.fixture
def tool(monkeypatch, tmp_path):
    """A function that puts a shell script on the path."""

    def make(name: str, script: str) -> None:
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")

    return make


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


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
def test_parts_end_in_time_and_are_summarised_last(tmp_path, out, monkeypatch, capsys):
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


# -------------------------------------------------------------------- the card


def test_times_are_those_of_graphs_where_calls_can_be_captured(cuda):
    card = Card()
    ran = []
    timing = card.time([lambda: ran.append(1), lambda: ran.append(2)])
    assert timing.how == "graph" and 0 < timing.low_s <= timing.median_s <= timing.high_s
    assert ran == [1, 2] * 12  # two warm-ups and one capture, with four turns each
    before = torch.cuda.current_stream()
    assert card.time([torch.cuda.synchronize]).how == "stream"
    assert torch.cuda.current_stream() is before


def test_calls_that_wait_for_the_gpu_are_not_captured(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: pytest.fail("torch does not recover from this"))
    assert Card().time([torch.cuda.Stream().synchronize]).how == "stream"
    assert torch.cuda.get_sync_debug_mode() == 0


def test_sets_of_tensors_exceed_the_cache(cuda):
    card = Card()
    assert card.num_sets(fake_cuda.L2_NBYTES) == 4 and card.num_sets(100 * fake_cuda.L2_NBYTES) == 2
    assert card.num_sets(1) == 64 and card.stays_in_l2(1, 64) and not card.stays_in_l2(fake_cuda.L2_NBYTES, 4)
    assert card.num_sets(fake_cuda.FREE_NBYTES) == 1  # more do not fit


def test_time_before_a_round_does_not_count(cuda):
    card, ran = Card(), []
    seconds = card.seconds(lambda: ran.append("work"), 2, before=lambda: (ran.append("before"), time.sleep(0.2)))
    assert ran == ["before", "work"] * 2 and max(seconds) < 0.2
    card.clean_l2()


def test_bandwidth_is_measured_by_size(cuda, out, monkeypatch):
    monkeypatch.setattr(bandwidth, "SIZES_NBYTES", (2**8, 2**18))
    result = bandwidth.measure(Budget(100))
    assert result.ok and len(result.lines) == 4
    rows = rows_of(out / "bandwidth.csv")
    assert {(row["operation"], row["nbytes"], row["in_l2"]) for row in rows} == {
        (operation, str(nbytes), in_l2)
        for operation in bandwidth.OPERATIONS
        for nbytes, in_l2 in ((2**8, "yes"), (2**18, ""))
    }
    assert all(float(row["gb_per_s"]) > 0 and row["sm_clock_mhz"] == "1980" for row in rows)
    short = Budget(2)
    bandwidth.measure(short)
    assert short.left_out == ["256 bytes", "262144 bytes"]


def test_nvidia_smi_is_called_if_it_is_installed(tool, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert nvidia_smi.query("name") == {}
    tool("nvidia-smi", "echo Some Card, 580.1")
    assert nvidia_smi.query("name", "driver_version") == {"name": "Some Card", "driver_version": "580.1"}
    tool("nvidia-smi", "exit 9")
    assert nvidia_smi.query("name") == {}


def test_a_clock_that_cannot_be_read_is_left_out(cuda, monkeypatch):
    class NVMLError(Exception):
        """As in the package that torch reads clocks with."""

    monkeypatch.setattr(torch.cuda, "clock_rate", unittest.mock.Mock(side_effect=NVMLError("Not Supported")))
    assert nvidia_smi.columns()["sm_clock_mhz"] == ""


# -------------------------------------------------------------------- the checks of gpu_light


def test_bits_that_differ_are_found(monkeypatch):
    class WrongHost(QuantizerHost):
        def decode(self, unit, scale=1.0, accumulate=False):
            super().decode(unit, scale, accumulate)
            unit.out[-1:].neg_()

    class Wrong(EFSignSGD):
        triton = WrongHost()

    monkeypatch.setattr(bits, "SIZES", (40,))
    monkeypatch.setattr(bits, "CONFIGURATIONS", {"Wrong": Wrong(), "Right": EFSignSGD()})
    cpu = torch.device("cpu")
    wrong = {row["call"] for row in bits.rows_of("Wrong", cpu) if row["agree"] == "no"}
    assert wrong == {"decode", "decode 3"}
    assert all(row["agree"] == "yes" for row in bits.rows_of("Right", cpu))


def test_memcheck_without_the_tool(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(memcheck, "PLACES", ())
    result = memcheck.check(Budget(10))
    assert result.ok and result.lines == ["not checked: compute-sanitizer is not installed"]


@pytest.mark.parametrize(
    ("script", "ok", "line"),
    [
        ("exit 0", True, "memcheck has found no errors in 6 compressors"),
        ("echo ========= Invalid read; exit 9", False, "memcheck has found errors"),
        ("echo ========= Device not supported; exit 1", True, "not checked: memcheck ended with 1"),
        ("echo TopK has run; exec sleep 60", True, "out of time: 1 of 6 compressors had run, without errors"),
    ],
)
def test_memcheck_reports_its_findings(tool, script, ok, line):
    tool("compute-sanitizer", script)
    result = memcheck.check(Budget(1))
    assert (result.ok, result.lines[0]) == (ok, line)


# -------------------------------------------------------------------- tests on a GPU


TOY = """
    import time
    import pytest
    pytestmark = pytest.mark.gpu

    @pytest.mark.parametrize("number", range(3))
    def test_wrong(number):
        assert number == 7

    def test_right():
        pass

    def test_illegal():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def test_skipped():
        pytest.skip("a reason")

    def test_endless():
        time.sleep(SECONDS)
"""


@pytest.fixture
def toy(tmp_path):
    def make(seconds: float = 0.0) -> str:
        path = tmp_path / "test_toy.py"
        path.write_text(textwrap.dedent(TOY.replace("SECONDS", str(seconds))))
        return str(path)

    return make


def test_failures_are_grouped_by_message(out, toy):
    result = pytest_runs.run("toy", [toy()], Budget(100))
    assert not result.ok and re.match(r"2 passed, 4 failed, 1 skipped; \d+ s of tests", result.lines[0])
    assert result.lines[1].split() == ["3", "x", "assert", "#", "==", "#"] and "test_wrong" in result.lines[2]
    assert "1 x RuntimeError: CUDA error: an illegal memory access" in result.lines[3]
    assert {case.outcome for case in pytest_runs.read(out / "toy.xml")} == {"passed", "failed", "skipped"}


@pytest.mark.slow
def test_a_worker_that_lost_the_gpu_is_replaced(out, toy):
    result = pytest_runs.run("toy", [toy()], Budget(100), workers=1)
    outcomes = {case.name.rpartition("::")[2]: case.outcome for case in pytest_runs.read(out / "toy.xml")}
    assert not result.ok and outcomes.pop("test_illegal") in ("failed", "error")
    assert outcomes == {f"test_wrong[{number}]": "failed" for number in range(3)} | {
        "test_right": "passed",
        "test_skipped": "skipped",
        "test_endless": "passed",
    }


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_has_no_more_time_keeps_what_it_found(out, toy, workers, monkeypatch):
    monkeypatch.setattr(pytest_runs, "END_S", 12.0)
    seconds = 40 if workers else 16
    budget = Budget(seconds)
    started = time.monotonic()
    result = pytest_runs.run("toy", [toy(seconds=100), "-k", "right or endless"], budget, workers=workers)
    assert time.monotonic() - started < seconds
    assert budget.left_out == ["the rest of the tests"]
    assert result.ok and result.lines[0].startswith("1 passed;")


def test_no_tests_are_no_success(out, toy):
    assert not pytest_runs.run("toy", [toy(), "-k", "nothing"], Budget(100)).ok


@pytest.mark.slow
@pytest.mark.parametrize("script", ["tests", "nccl"])
def test_every_part_finds_its_tests(out, script, monkeypatch, tmp_path, capfd):
    """Collection is that of a machine with a GPU."""
    (tmp_path / "with_a_gpu.py").write_text("import torch; torch.cuda.is_available = lambda: True")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only -p with_a_gpu")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(pytest_runs, "num_workers", lambda: 0)
    for part in importlib.import_module(f"bench.gpu.{script}").PARTS:
        result = part.work(Budget(280))
        printed = capfd.readouterr().out
        assert result.lines == ["no test has run; 0 s of tests"], printed
        assert int(re.search(r"(\d+)(/\d+)? tests collected", printed).group(1)) > 0


# -------------------------------------------------------------------- measurements


@pytest.fixture
def bench(cuda, out):
    """A ``Bench`` that writes into the results folder."""
    return gpu_kernels.Bench(Recorder(torch.device("cuda"), keep=False))


def test_a_case_is_compared_with_a_copy_of_as_many_bytes(bench, out):
    cases = [Case("EFSignSGD", "decode", sources, FUSED, 2**15) for sources in (1, 8)]
    bench.run(cases, Budget(100))
    rows = rows_of(out / "microbench.csv")
    assert [row["sources"] for row in rows] == ["1", "8"]
    assert all(row["timing"] == "graph" and row["sets"] == "2" and not row["in_l2"] for row in rows)
    for case, nbytes in zip(cases, sorted(bench._copies_s), strict=True):
        assert case.moved_nbytes <= nbytes <= 9 / 8 * case.moved_nbytes


def test_small_calls_cost_the_host(bench, out):
    bench.run([Case("EFSignSGD", "encode", 1, which, 2**14) for which in (FUSED, BOUND)], Budget(100))
    rows = rows_of(out / "microbench.csv")
    assert [row["implementation"] for row in rows] == [FUSED, BOUND]
    assert all(float(row["host_us_per_call"]) > 0 and row["sets"] == "1" for row in rows)
    line = gpu_kernels.table(rows)[1]
    assert line.split() == ["EFSignSGD", *(row["host_us_per_call"] for row in rows)]


def test_peers_are_named_in_the_rows_of_ours(bench, out, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    bench.run([Case("EFSignSGD", "encode", 1, which, 2**15) for which in (COMPILED, EAGER, FUSED)], Budget(100))
    rows = rows_of(out / "microbench.csv")
    (ours,) = (row for row in rows if row["implementation"] == FUSED)
    assert ours["factor_over_eager"] and ours["factor_over_compiled"]
    assert gpu_kernels.factors(rows)[0].split()[:2] == ["EFSignSGD", "encode"]


def test_a_case_that_fails_leaves_a_note(bench, out, monkeypatch):
    monkeypatch.setattr(Case, "on", lambda *_: 1 / 0)
    bench.run([Case("EFSignSGD", "encode", 1, FUSED, 2**15)], Budget(100))
    assert [row["note"] for row in rows_of(out / "microbench.csv")] == [
        "not measured: ZeroDivisionError: division by zero"
    ]


def test_after_a_broken_connection_the_process_restarts(bench, out, monkeypatch):
    cases = [Case("EFSignSGD", "encode", 1, FUSED, 2**15)]

    def on(case: Case, tensors: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    begun: list[object] = []
    for name in ("BENCH_FIRST_CASE", "BENCH_DEADLINE"):
        monkeypatch.setenv(name, "0")  # so that monkeypatch restores them
    monkeypatch.setattr(Case, "on", on)
    monkeypatch.setattr(os, "execv", lambda *command: begun.append((os.environ["BENCH_FIRST_CASE"], command)))
    bench.run(cases, Budget(100))
    assert begun == [("1", (sys.executable, [sys.executable, *sys.argv]))]
    monkeypatch.setattr(Case, "on", lambda *_: begun.append("the first case is not measured again"))
    bench.run(cases, Budget(100))
    assert len(begun) == 1


def test_cases_without_time_are_counted(bench):
    budget = Budget(0)
    bench.run(gpu_kernels.peer_cases(), budget)
    count = len(gpu_kernels.peer_cases())
    assert budget.left_out == [f"{count} of {count} cases"]


def test_the_kernels_of_all_parts_are_compiled_first(monkeypatch):
    launches: list[Launch] = []
    monkeypatch.setattr(compilation, "compile_all", lambda recorded, budget: launches.extend(recorded))
    importlib.import_module("bench.gpu.bench").compile_kernels(Budget(1))
    kernels = {launch.kernel.fn.__name__ for launch in launches}
    assert kernels >= {"_encode_kernel", "_encode_batch_kernel", "_decode_batch_kernel"}  # one by one and bound
    assert kernels >= {"_left_kernel", "_reconstruct_kernel"}  # PowerSGD's


def test_launchers_of_older_releases_are_compiled_with_the_kernels(monkeypatch):
    driver, made = compilation.driver, []
    monkeypatch.setattr(driver, "CudaLauncher", lambda kernel, metadata: made.append(kernel) or 1 / 0)
    monkeypatch.setattr(driver, "make_launcher", None, raising=False)
    compilation._compile_launcher("kernel", None)
    assert made == ["kernel"]
    monkeypatch.delattr(driver, "make_launcher")
    compilation._compile_launcher("another", None)
    assert made == ["kernel"]


RECORDED = """
from bench.gpu.compilation import distinct
from bench.kernels.gpu_kernels import bandwidth_cases

launches = [launch for case in bandwidth_cases() for launch in case.launches()]
assert len(launches) > len(distinct(launches)) > 100
"""

LOOKED_FOR = """
from bench.lib import fake_driver
import torch
import triton.compiler
from bench.gpu import bits, compilation

import gckernels

def key(source, options):
    return source.hash(), triton.compiler.make_backend(fake_driver.TARGET).parse_options(dict(options)).hash()

looked_for, compiled = set(), set()
fake_driver.install()
compile_nothing = triton.compiler.compile

def compile(src, target, options, **rest):
    looked_for.add(key(src, options))
    return compile_nothing(src, target, options, **rest)

triton.compiler.compile = compile
for spec in ("EFSignSGD", "EFSignSGD(block=None)", "TopK", "Cast16"):
    compressor = gckernels.from_spec(spec)
    for numel in (1, 1500):
        for launch in compilation.distinct(bits.launches(compressor, numel, torch.float32)):
            compiled.add(key(compilation.source(launch, 90), launch.options))
        for _, check in bits.compare(compressor, numel, torch.float32, torch.device("cpu"), seed=0):
            try:
                check()
            except AssertionError:
                pass  # nothing has run
assert compiled == looked_for, (len(compiled), len(looked_for), len(compiled & looked_for))
assert len(compiled) > 20
"""


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(RECORDED, id="cases of a GPU", marks=pytest.mark.slow),
        pytest.param(LOOKED_FOR, id="what launches look for"),
    ],
)
def test_kernels_are_compiled_before_they_are_launched(script):
    """Runs in a process that does not interpret kernels."""
    output_of("-c", script, timeout_s=200)


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
        [part, "ok"] for part in ("machine", "compile", "bandwidth", "bits", "memcheck")
    ]
    assert {path.name for path in (tmp_path / "out").iterdir()} == LIGHT_FILES
    assert all(not row["error"] for row in rows_of(tmp_path / "out" / "compiled.csv"))
    checked = rows_of(tmp_path / "out" / "bits.csv")
    assert len(checked) == 40 and {row["agree"] for row in checked} == {"yes"}
    assert {(row["driver"], row["memory_clock_mhz"]) for row in checked} == {("580.1", "3201")}


@pytest.mark.slow
def test_a_kernel_that_ends_its_process_costs_its_own_configuration(tmp_path):
    printed = rehearse(tmp_path, "light", "--only", "bits", environment={"FAULTS": "1"})
    assert "40 of 42 calls agree, 2 configurations have wrong calls\nDies: 1\nBreaks: 1\n" in printed


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
    command = ["make", "--dry-run", target, f"OUT={tmp_path}", "PARTS=one two", "PYTHON=python"]
    # if make runs the tests, it passes on its own flags and depth
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=True)
    *_, last = run.stdout.splitlines()
    assert f'BENCH_OUT="{tmp_path}"' in last and last.endswith(f"python -m bench.gpu.{script} one two")
    assert (ROOT / "bench" / "gpu" / f"{script}.py").exists()
