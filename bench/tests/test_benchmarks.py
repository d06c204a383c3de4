"""Tests of the compressors' benchmark: the bytes it counts, how its rows replace older ones, and that it runs."""

import os
import sys
from pathlib import Path

import pytest
import torch

from bench_runs import rows_of
from processes import output_of

BENCH = Path(__file__).parents[1]
CPU = torch.device("cpu")


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """Redirects results to a temporary folder."""
    from bench.lib import record

    monkeypatch.setattr(record, "RESULTS", tmp_path)
    return record


def test_the_fewest_bytes_are_those_counted_by_hand(bench):
    from bench.lib.cases import FUSED, Case

    # 1024 elements of EFSignSGD: 16 bytes of header, 32 bytes for eight scales, 128 bytes for 1024 bits
    assert Case("EFSignSGD", "encode", 1, FUSED, 1024).moved_nbytes == 4096 + 4096 + 4096 + 176
    assert Case("EFSignSGD", "decode", 4, FUSED, 1024).moved_nbytes == 4 * 176 + 4096
    assert Case("Identity", "encode", 1, FUSED, 1024).moved_nbytes == 4096 + 4096  # no feedback
    assert Case("copy", "copy", 1, FUSED, 1024).moved_nbytes == 4096 + 4096


def test_a_partial_run_replaces_its_own_rows_alone(bench):
    from bench.lib.cases import EAGER, EAGER_NUMEL, FUSED, Case
    from bench.lib.timings import Recorder, Timing

    def written():
        rows = bench.read_csv(recorder.path)
        return {(row["compressor"], row["implementation"]): (row["median_s"], row["factor_over_eager"]) for row in rows}

    sign, identity = (Case(spec, "decode", 1, FUSED, EAGER_NUMEL) for spec in ("EFSignSGD", "Identity"))
    recorder = Recorder(CPU, keep=False)
    for case in (sign, identity):
        recorder.add(case, 1, Timing(1, 2, 3, 1, 8))
    recorder = Recorder(CPU, keep=True)
    _, eager, _ = identity.compared()
    recorder.add(eager, 1, Timing(8, 8, 8, 1, 8))
    recorder.add(identity, 1, Timing(4, 4, 4, 1, 8))
    kept = {("EFSignSGD", FUSED): ("2", "")}
    assert written() == kept | {("Identity", EAGER): ("8", ""), ("Identity", FUSED): ("4", "2.0")}
    recorder = Recorder(CPU, keep=False)
    recorder.add(sign, 1, None, note="too large")
    assert written() == {("EFSignSGD", FUSED): ("", "")}


def test_a_partial_run_does_not_mix_devices(bench, monkeypatch):
    from bench.lib.cases import FUSED, Case
    from bench.lib.timings import Recorder

    Recorder(CPU, keep=False).add(Case("Identity", "encode", 1, FUSED, 4), 1, None, note="some reason")
    monkeypatch.setattr("bench.lib.timings.device_name", lambda device: "another processor")
    with pytest.raises(ValueError, match="measure everything"):
        Recorder(CPU, keep=True)
    Recorder(CPU, keep=False)


def test_a_recorded_command_is_relative_to_the_root(bench, monkeypatch):
    script = BENCH / "sync" / "steps.py"
    for argument in (script, os.path.relpath(script)):
        monkeypatch.setattr(sys, "argv", [str(argument), "--rates", "1gbit"])
        assert bench.environment(CPU)["command"] == "python -m bench.sync.steps --rates 1gbit"


def test_every_result_says_how_it_was_made(bench):
    """The history has the dates of other files. No command holds an absolute path."""
    tables = {row["file"] for row in bench.read_csv(BENCH / "results" / "cpu" / "compiled_tables.csv")}
    assert tables == {"kernels.csv", "pipes.csv"}
    for path in sorted((BENCH / "results").rglob("*.csv")):
        if path.name not in {"history.csv", *tables}:
            rows = bench.read_csv(path)
            assert rows and all({"device", "torch", "triton", "date", "command"} <= row.keys() for row in rows), path
            assert not [word for row in rows for word in row["command"].split() if word.startswith("/")], path


@pytest.mark.parametrize(("text", "numel"), [("1", 1), ("16Ki", 2**14), ("256Mi", 2**28)])
def test_sizes_are_read_as_they_are_written(bench, text, numel):
    from bench.lib.sizes import format_numel, parse_numel

    assert parse_numel(text) == numel
    assert format_numel(numel) == text


def test_benchmarks_become_rows(monkeypatch, out, tmp_path):
    pytest.importorskip("pytest_benchmark")
    from bench.kernels import microbench

    path = tmp_path / "kernels.json"
    arguments = ["--compressors", "EFSignSGD(block=128)", "--sizes", "1Ki", "--benchmark-json", path]
    few_rounds = ("--benchmark-only", "--benchmark-max-time=0", "--benchmark-min-rounds=1")
    alone = {"PYTEST_XDIST_WORKER": "", "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    output_of("-m", "pytest", "bench/kernels", *few_rounds, *arguments, **alone)
    monkeypatch.setattr(sys, "argv", ["bench.kernels.microbench", str(path)])
    microbench.main()
    rows = rows_of(out / "microbench.csv")
    calls = {("encode", "1"), ("decode", "1"), ("decode", "4"), ("recode", "4")}
    measured = {(row["direction"], row["sources"], row["implementation"]) for row in rows}
    assert measured == {(*call, name) for call in calls for name in ("gckernels", "eager torch")}
    assert all(float(row["percent_of_copy"]) > 0 and float(row["host_us_per_call"]) > 0 for row in rows)
    assert all(row["factor_over_eager"] for row in rows if row["implementation"] == "gckernels")
