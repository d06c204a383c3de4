"""Test of the benchmark of plans: the small problems have figures, and ResNet-101 is that of the paper."""

from __future__ import annotations

import pytest

from bench.planner import selection


def test_small_problems_have_figures(monkeypatch):
    written = []
    monkeypatch.setattr("sys.argv", ["selection", "--parts", "exhaustive"])
    for name, value in {
        "INSTANCES": 1,
        "MAX_BITS": 12,
    }.items():
        monkeypatch.setattr(selection, name, value)
    monkeypatch.setattr(selection, "merge_csv", lambda name, device, rows, key: written.extend(rows))
    selection.main()
    figures = {(row["part"], row["figure"]): float(row["value"]) for row in written}
    assert set(figures) == {("exhaustive", "within 1 %"), ("exhaustive", "largest distance")}
    assert figures["exhaustive", "largest distance"] <= 3.0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_many_tensors_and_programs_need_little_memory():
    (figure,) = selection.memory()
    assert figure["unit"] == "MB" and float(figure["value"]) < 500


def test_resnet_has_the_gradients_of_resnet():
    trace = selection.resnet101()
    assert len(trace.tensors) == 314 and sum(tensor.numel for tensor in trace.tensors) == 44_549_160
    assert trace.tensors[-1].ready_s == trace.backward_s
