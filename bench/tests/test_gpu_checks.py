"""Tests of the checks on a GPU, without one: bits, memcheck, and the runs of the tests."""

from __future__ import annotations

import importlib
import os
import re
import textwrap
import time
from pathlib import Path

import pytest
import torch

from bench.gpu import bits, low_rank, memcheck, pytest_runs
from bench.lib.budget import Budget
from gckernels import EFSignSGD
from gckernels.codec import Backend
from gckernels.ops.powersgd import host, kernels
from gckernels.toolkit.quantizer.host import QuantizerHost

# -------------------------------------------------------------------- bits and memcheck


def test_bits_that_differ_are_found(monkeypatch):
    class WrongHost(QuantizerHost):
        def decode(self, unit, scale=1.0, accumulate=False):
            super().decode(unit, scale, accumulate)
            unit.out[-1:].neg_()

        bind_decodes = Backend.bind_decodes

    class Wrong(EFSignSGD):
        triton = WrongHost()

    monkeypatch.setattr(bits, "SHAPES", ((40, torch.float32), (77, torch.bfloat16)))
    monkeypatch.setattr(bits, "CONFIGURATIONS", {"Wrong": Wrong(), "Right": EFSignSGD()})
    cpu = torch.device("cpu")
    wrong = {row["call"] for bound in (True, False) for row in bits.rows_of(("Wrong", bound), cpu) if row["message"]}
    assert wrong == {"bound decodes 1", "bound decodes 3", "decode 1", "decode 3"}
    assert [row for bound in (True, False) for row in bits.rows_of(("Right", bound), cpu) if row["message"]] == []


def test_products_that_differ_are_found(monkeypatch):
    def wrong(grads, residuals, right, left, scale):
        work = host.bind_left(grads, residuals, right, left, scale)
        return lambda: (work(), left[1].mul_(1.001))

    for stage in ("left", "right", "orthogonalise", "keep", "reconstruct"):
        monkeypatch.setattr(kernels, f"bind_{stage}", getattr(host, f"bind_{stage}"))
    cases = (4, 1500, torch.bfloat16, torch.device("cpu"), torch.Generator())
    for _, check in low_rank.compare(*cases):
        check()
    monkeypatch.setattr(kernels, "bind_left", wrong)
    with pytest.raises(AssertionError, match="than rounding explains"):
        dict(low_rank.compare(*cases))["left"]()


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
def test_a_run_that_has_no_more_time_keeps_what_it_found(out, toy, workers, monkeypatch, in_background):
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


def test_files_of_tests_that_parts_name_exist():
    folder = Path(pytest_runs.__file__).parent
    named = {path for script in folder.glob("*.py") for path in re.findall(r"\btests/[\w/]+\.py", script.read_text())}
    assert "tests/sync/frontends/test_gpu.py" in named
    assert [path for path in sorted(named) if not (folder.parents[1] / path).is_file()] == []


@pytest.mark.slow
@pytest.mark.parametrize("script", ["tests", "nccl"])
def test_every_part_finds_its_tests(out, script, monkeypatch, tmp_path, capfd):
    """Tests are collected as on a machine with a GPU."""
    (tmp_path / "with_a_gpu.py").write_text("import torch; torch.cuda.is_available = lambda: True")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only -p with_a_gpu")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setattr(pytest_runs, "num_workers", lambda: 0)
    for part in importlib.import_module(f"bench.gpu.{script}").PARTS:
        result = part.work(Budget(280))
        printed = capfd.readouterr().out
        assert result.lines == ["no test has run; 0 s of tests"], printed
        assert int(re.search(r"(\d+)(/\d+)? tests collected", printed).group(1)) > 0
