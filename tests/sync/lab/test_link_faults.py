"""Tests of faults of links: cut, back, throttled, and on a schedule."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path

import pytest
from test_networks import rate_at

from gckernels.sync import lab
from gckernels.sync.lab import Event, Network
from network_namespaces import WAIT_S, script, wait_until

COUNT = """
import contextlib, os, socket, time
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.bind(("", 9000))
own.settimeout(0.1)
if os.environ["RANK"] == "1":
    with open("arrived", "wb", buffering=0) as file:
        while not os.path.exists("end"):
            with contextlib.suppress(TimeoutError):
                file.write(own.recv(1))
else:
    while not os.path.exists("end"):
        with contextlib.suppress(OSError):
            own.sendto(b"x", ("10.77.0.2", 9000))
        time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("text", "event"),
    [
        ("5s cut 1", Event(5, "cut", 1)),
        ("1.5s restore machine0", Event(1.5, "restore", "machine0")),
        ("200ms throttle 0 10mbit", Event(0.2, "throttle", 0, "10mbit")),
    ],
)
def test_events_are_text(text, event):
    assert Event.from_text(text) == event
    assert Event.from_text(str(event)) == event


@pytest.mark.parametrize("text", ["", "cut 1", "5 cut 1", "5s cut", "5s cut 1 10mbit", "5s throttle 1", "-5s cut 1"])
def test_events_are_checked(text):
    with pytest.raises(ValueError, match="must be written like"):
        Event.from_text(text)


@pytest.mark.parametrize(
    "arguments",
    [(-1, "cut", 1), (1, "break", 1), (1, "cut", 1, "1mbit"), (1, "throttle", 1), (1, "throttle", 1, "slow")],
)
def test_events_that_cannot_be_are_refused(arguments):
    with pytest.raises(ValueError, match=r"^(an event|the action of an event|rate) "):
        Event(*arguments)


@pytest.mark.parametrize(
    ("network", "place"),
    [
        pytest.param(Network(2), 1, marks=pytest.mark.slow),
        (Network(2, "10mbit", delay_s=0.001), 1),
        (Network(2, ranks_per_machine=2), 1),
        pytest.param(Network(2), "machine0", marks=pytest.mark.slow),
    ],
    ids=["rank", "delayed", "rank of two", "machine"],
)
def test_nothing_passes_until_a_cut_link_is_back(folder, network, place):
    arrived = folder / "arrived"
    with lab.links(network) as made:
        codes: list[int] = []
        ranks = threading.Thread(target=lambda: codes.extend(made.run(script(folder, COUNT), timeout_s=WAIT_S)))
        ranks.start()
        wait_until(lambda: arrived.exists() and arrived.stat().st_size > 3)
        made[place].cut()
        before = settled_size(arrived)
        made[place].restore()
        wait_until(lambda: arrived.stat().st_size > before + 3)
        (folder / "end").touch()
        ranks.join()
    assert codes == [0, 0]


def settled_size(path: Path) -> int:
    """The size of a file when it has not grown for a while. Packets that were on their way still arrive, on a busy
    machine late."""
    for _ in range(100):
        before = path.stat().st_size
        time.sleep(0.3)
        if path.stat().st_size == before:
            return before
    pytest.fail(f"{path} still grows")


def test_links_can_be_throttled_and_restored(folder):
    with lab.links(Network(2, "100mbit")) as made:
        ends = [(made.namespaces[1], "eth0"), (made._outer, "port1")]
        for rate, found in (("10mbit", 10**7), ("none", None), ("1gbit", 10**9)):
            made[1].throttle(rate)
            assert [rate_at(*end) for end in ends] == [found, found]
        made["machine1"].restore()
        assert [rate_at(*end) for end in ends] == [10**8, 10**8]
        assert rate_at(made.namespaces[0], "eth0") == 10**8


def test_unthrottled_links_are_restored(folder):
    with lab.links(Network(1)) as made:
        made[0].throttle("10mbit")
        made[0].restore()
        made[0].restore()
        assert rate_at(made.namespaces[0], "eth0") is None


def test_wrong_changes_change_nothing(folder):
    with lab.links(Network(1)) as made:
        with pytest.raises(ValueError, match=re.escape("0 to 0, or by a machine, machine0 to machine0; got 1")):
            _ = made[1]
        with pytest.raises(ValueError, match="rate must be written"):
            made[0].throttle("slow")
        with pytest.raises(ValueError, match="got 7"):
            made.run("never.py", schedule=[Event(0, "cut", 7)])
        assert rate_at(made.namespaces[0], "eth0") is None


def test_a_schedule_is_kept(folder):
    schedule = [Event(0.2, "throttle", 0, "20mbit"), Event(0.1, "throttle", 0, "10mbit"), Event(1000, "cut", 0)]
    announced: list[Event] = []
    text = "import os, time\nwhile not os.path.exists('end'): time.sleep(0.01)"

    def announce(event: Event) -> None:
        announced.append(event)
        if len(announced) == 2:
            Path("end").touch()

    with lab.links(Network(1)) as made:
        assert made.run(script(folder, text), timeout_s=WAIT_S, schedule=schedule, announce=announce) == [0]
        assert announced == [schedule[1], schedule[0]]
        assert rate_at(made.namespaces[0], "eth0") == 20 * 10**6
