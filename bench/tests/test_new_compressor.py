"""Test that the benchmarks measure the compressor of ``docs/tutorials/new_compressor.md`` once it is registered."""

from __future__ import annotations

import pytest

from new_compressor import run, written


@pytest.mark.slow
def test_the_benchmarks_take_it_up(tmp_path):
    written(tmp_path)
    script = (
        "import laplace3; from bench.lib import cases; from gckernels.testing import configurations;"
        "assert 'Laplace3' in configurations.CONFIGURATIONS;"
        "print(*{case.spec for case in cases.all_cases(cases.all_specs(), cases.HOST_NUMEL)})"
    )
    assert "Laplace3" in run(tmp_path, "-c", script)
