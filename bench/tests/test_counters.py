"""The findings of NVIDIA's ``ncu`` become a table and a file."""

from __future__ import annotations

import pytest

from bench.gpu import counters
from bench.lib.budget import Budget
from bench_runs import rows_of

FINDINGS = """cat <<END
==PROF== Profiling "_encode_kernel"
"ID","Kernel Name","gpu__time_duration.sum"
"","","us"
"0","_encode_kernel","17.5"
END"""


def test_findings(tool, out):
    tool("ncu", FINDINGS)
    result = counters.profile(Budget(20))
    assert result.ok and result.lines[0] == "1 launches profiled"
    assert result.lines[2].split()[:3] == ["_encode_kernel", "17.5", "?"]
    assert [row["Kernel Name"] for row in rows_of(out / "profile.csv")] == ["", "_encode_kernel"]


@pytest.mark.parametrize(
    ("script", "ok", "line"),
    [
        ("echo ==ERROR== refused; exit 1", True, "not profiled: ncu ended with 1"),
        ("exec sleep 60", False, "out of time: name fewer compressors in BENCH_PROFILED"),
    ],
)
def test_without_findings(tool, script, ok, line):
    tool("ncu", script)
    result = counters.profile(Budget(1))
    assert (result.ok, result.lines[0]) == (ok, line)


def test_without_the_tool(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(counters, "PLACES", ())
    assert counters.profile(Budget(10)).lines == ["not profiled: ncu is not installed"]
