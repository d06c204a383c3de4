"""Rank 0 says before and after what is measured, and nothing if a profile was kept."""

from __future__ import annotations

import logging

import torch.distributed as dist

from gckernels.sync.tuning.measuring import Progress
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
    progress = Progress(dist.distributed_c10d._get_default_group())
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
