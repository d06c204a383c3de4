"""Decisions are kept in order, and logged on the ranks that should log them."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

from gckernels.sync import Frontend
from gckernels.sync.stats.decisions import Decision
from gckernels.sync.stats.stats import Figures

DECISION = Decision(12, "plain 266 ms; compress", "auto", "3f9a", predicted_s=0.096, none_s=0.266)


@pytest.mark.parametrize(
    ("rank", "level", "is_logged"),
    [(0, logging.INFO, True), (1, logging.INFO, False), (0, logging.WARNING, True), (1, logging.WARNING, True)],
)
def test_rank_0_logs_all_and_others_warnings(caplog, rank, level, is_logged):
    with caplog.at_level(logging.DEBUG, logger="gckernels"):
        Figures(SimpleNamespace(kind=Frontend.DDP, rank=rank)).decide(replace(DECISION, level=level))
    assert caplog.record_tuples == [("gckernels", level, "gckernels: plain 266 ms; compress")] * is_logged


@pytest.mark.parametrize(
    ("field", "value"),
    [("step", -1), ("step", 1.5), ("text", ""), ("text", "two\nlines"), ("none_s", -1.0), ("error", float("nan"))],
)
def test_a_damaged_decision_is_refused(field, value):
    with pytest.raises(ValueError, match=f"decision: {field} must be"):
        replace(DECISION, **{field: value})
