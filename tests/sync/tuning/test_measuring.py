"""Measurements of a tuned training: what rank 0 says of them, and what follows if ranks cannot connect."""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from gckernels.sync.communication.agreement import Failure
from gckernels.sync.communication.groups import NotConnected
from gckernels.sync.predictive import measuring
from gckernels.sync.predictive.measuring import ProgressLine
from ranks import run_ranks, values_of


class Lines(logging.Handler):
    """The lines of a log."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def lines_of(parts: int) -> list[str]:
    """The lines that a rank logs while it measures some parts."""
    logger, lines = logging.getLogger("gckernels"), Lines()
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    progress = ProgressLine(dist.distributed_c10d._get_default_group())
    for part in range(parts):
        progress(part / parts, "AllReduce")
    progress.close()
    logger.removeHandler(lines)
    logger.setLevel(logging.NOTSET)
    return lines.texts


def test_rank_0_says_that_it_measures():
    (before, after), others = values_of(run_ranks(2, lines_of, 3))
    assert "measuring its links and compressors on 2 ranks, for at most 10.0 s" in before
    assert "measured this machine on 2 ranks in" in after and others == []


def test_a_kept_profile_needs_no_words():
    assert values_of(run_ranks(2, lines_of, 0)) == [[], []]


def measured_without_connections() -> Any:
    """The outcome of a measurement when the ranks cannot connect to a group for it."""
    refused = NotConnected("process groups could not be made: refused (rank 1)")
    with mock.patch.object(measuring, "make_groups", side_effect=refused):
        return measuring.apart(dist.group.WORLD, torch.device("cpu"), lambda own: 1)


def test_a_measurement_needs_a_group_of_its_own():
    assert (
        values_of(run_ranks(2, measured_without_connections))
        == [Failure("process groups could not be made: refused (rank 1)")] * 2
    )
