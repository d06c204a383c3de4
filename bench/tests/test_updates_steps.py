"""Tests of the measurement of steps whose updates are averaged, over loopback."""

from __future__ import annotations

import argparse
from unittest import mock

from bench.lib.arms import PLAIN, Setting
from bench.sync import updates
from gckernels.sync.lab import Network
from ranks import run_ranks, values_of


def turns() -> dict[str, int]:
    """The number of synchronisations in two turns of each arm."""
    setting, counted = Setting.of("bytes_lm", Network(2)), [0]
    found = {}
    with mock.patch.object(updates, "sent_nbytes", lambda: counted[0]):
        for arm in (PLAIN, "BlockQuant(bits=4)", "EFSignSGD, every 2", "Identity, every 4, delay 1"):
            training = updates.Training(arm, setting)
            for _ in range(2):
                step_s, sent = training.turn()
                assert step_s > 0 and sent == 0
            attachment = training.attachment
            found[arm] = -1 if attachment is None else attachment.steps
            training.close()
    return found


def test_a_turn_is_a_round():
    for found in values_of(run_ranks(2, turns)):
        assert [*found.values()] == [-1, 2, 2, 1]  # with a delay the last mean is still on its way


def test_cells_have_plain_ddp_twice():
    with mock.patch("sys.argv", ["updates", "--rates", "2mbit", "20mbit", "--arms", "TopK, every 3"]):
        args = updates.parse_args()
    assert isinstance(args, argparse.Namespace)
    cells = updates.cells_of(args)
    assert [each.arms for each in cells] == [("plain", "plain again", "TopK, every 3")] * 2
