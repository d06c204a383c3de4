"""The page about two machines, followed word for word: torchrun is started twice, in two network namespaces."""

from __future__ import annotations

import itertools
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import HashStore

from gckernels.planner.commands.advising import links as measuring
from gckernels.sync import lab
from gckernels.sync.lab import namespaces
from network_namespaces import script

PAGE = (Path(__file__).parents[3] / "docs" / "howto" / "two_machines.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"<!-- on (\w) -->\n\n```console\n(.*?)```", PAGE, re.S))
SHELL = """
import os, subprocess, sys
from pathlib import Path

rank = int(os.environ["RANK"])
for name in [*os.environ]:  # a new shell on a machine
    if name.startswith(("RANK", "LOCAL_", "WORLD", "MASTER", "GROUP", "ROLE", "TORCHELASTIC", "GLOO", "NCCL")):
        del os.environ[name]
folder = Path(sys.executable).parent
os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
lines = Path(f"{rank}.sh").read_text()
finished = subprocess.run(["bash", "-ec", lines], capture_output=True, text=True)
Path(f"{rank}.txt").write_text(finished.stdout + finished.stderr)
sys.exit(finished.returncode)
"""
FIREWALL = (
    "neigh add 10.77.9.9 lladdr 02:00:00:00:00:99 dev eth0 nud permanent",
    "route add default via 10.77.9.9 dev eth0 onlink table 100",
    "rule add pref 10 ipproto tcp dport 29500 lookup main",
    "rule add pref 20 ipproto tcp lookup 100",
)
"""Packets to other ports than the first one go to nobody."""
TIMEOUT_S = 240


def followed(
    folder: Path, instead: dict[str, str] | None = None, is_closed: bool = False
) -> tuple[list[int], list[str]]:
    """The exit codes and outputs of the two machines.

    Args:
        folder: where everything is done.
        instead: what is typed on both in place of something.
        is_closed: whether a firewall is between them.
    """
    path = script(folder, SHELL)
    for rank, machine in enumerate("ab"):
        lines = re.sub(r"^\$ ", "", BLOCKS[machine], flags=re.M)
        for mine, theirs in (instead or {}).items():
            assert mine in lines
            lines = lines.replace(mine, theirs)
        (folder / f"{rank}.sh").write_text(lines)
    with lab.links(lab.Network(2, "50mbit")) as made:
        for words in FIREWALL if is_closed else ():
            namespaces.run_tool("ip", "-n", made.namespaces[1], *words.split())
        codes = made.run(path, timeout_s=TIMEOUT_S, grace_s=60)
    return codes, [(folder / f"{rank}.txt").read_text() for rank in range(2)]


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_the_page_followed_word_for_word_measures_the_link(folder):
    codes, (first, _) = followed(folder)
    assert codes == [0, 0], first
    assert re.search(r"rank 0 on \S+ +rank 1 on \S+ at 10\.77\.0\.2 +[\d.]+ ms +4[5-9]\.\d Mbit/s", first), first
    assert "the gradients of 10 million parameters take" in first


@pytest.mark.slow
@pytest.mark.timeout(2 * TIMEOUT_S)
@pytest.mark.parametrize(
    ("instead", "is_closed", "message"),
    [
        ({"GLOO_SOCKET_IFNAME=eth0": "UNUSED=1"}, False, "would listen at 127.0.0.1, where other machines do not"),
        ({"GLOO_SOCKET_IFNAME=eth0": "GLOO_SOCKET_IFNAME=eth7"}, False, "must be an interface of"),
        ({}, True, r"cannot connect to rank 0 on .* at 10\.77\.0\.1 in 5 s \(timed out\): let a firewall pass"),
    ],
)
def test_mistakes_are_named_on_both_machines(folder, instead, is_closed, message):
    codes, outputs = followed(folder, instead, is_closed)
    assert 0 not in codes
    for output in outputs:
        assert re.search(message, output), output


def test_ranks_of_one_machine_are_measured_as_well():
    store, ranks = HashStore(), range(3)
    with ThreadPoolExecutor() as pool:
        first, *others = pool.map(lambda rank: measuring.links_between(store, rank, len(ranks)), ranks)
    assert [(each.source.rank, each.target.rank) for each in first] == [*itertools.permutations(ranks, 2)]
    assert all(each.bit_per_s > 0 and 0 < each.round_trip_s < 1 for each in first)
    assert all(each == first for each in others)


def endpoint(rank: int, address: str, **interfaces: str) -> measuring.Endpoint:
    return measuring.Endpoint(rank, "ab"[rank], address, 1, interfaces)


def test_machines_that_do_not_reach_each_other_are_named_at_once():
    here, there = endpoint(0, "127.0.1.1", eth0="10.0.0.1", wg0="10.9.0.1"), endpoint(1, "127.0.0.1", eth0="10.0.0.2")
    (problem,) = measuring._problems(here, [here, there])
    assert "rank 0 on a would listen at 127.0.1.1" in problem and "eth0 (10.0.0.1), wg0 (10.9.0.1)" in problem
    refused = replace(there, address="127.0.0.1")
    assert measuring._problems(replace(here, address="10.0.0.1"), [here, refused]) == []  # which says so itself
    assert measuring._problems(here, [here, replace(here, rank=1)]) == []  # on one machine


def test_an_interface_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    with pytest.raises(measuring.LinkError, match=r"must be an interface of .*; got nothing0"):
        measuring._address()
