"""Tests of the process that changes links for the ranks of a measurement."""

from __future__ import annotations

from unittest import mock

import pytest

from bench.lib import changes
from gckernels.sync import lab


class Links:
    """Records what is done to its links; rank 7 has none."""

    def __init__(self):
        self.done = []

    def __getitem__(self, place):
        if place == 7:
            raise ValueError("there is no such link")
        link = mock.create_autospec(lab.LabLink, instance=True)  # has the methods of real links, and no others
        link.cut.side_effect = lambda: self.done.append(("cut", place))
        link.throttle.side_effect = lambda rate: self.done.append(("throttle", place, rate))
        return link


@pytest.fixture
def links():
    made = Links()
    with changes.served(made):
        yield made


def test_links_have_changed_when_the_request_returns(links):
    changes.change("throttle", "machine0", "10mbit")
    changes.change("cut", 1)
    assert links.done == [("throttle", "machine0", "10mbit"), ("cut", 1)]


def test_the_rank_that_asks_gets_the_error(links):
    with pytest.raises(RuntimeError, match="cut 7: there is no such link"):
        changes.change("cut", 7)
    with pytest.raises(RuntimeError, match="no such change"):
        changes.change("run", "something")
    changes.change("cut", 1)
    assert links.done == [("cut", 1)]
