"""Tests of networks: their descriptions, two levels, rates of single links, and delay."""

from __future__ import annotations

import hashlib
import json
import os

import pytest

from gckernels.planner import commands
from gckernels.sync import lab
from gckernels.sync.lab import LinksError, Network, namespaces
from gckernels.sync.programs.steps import Level
from gckernels.sync.programs.topology import Topology
from network_namespaces import WAIT_S, script

SEND = """
import os, socket, sys
receiver, rank = int(sys.argv[1]), int(os.environ["RANK"])
data = bytes(range(256)) * 2**13
if rank == receiver:
    listener = socket.create_server(("", 9000))
    open("listening", "w").close()
    connection, _ = listener.accept()
    with connection, open("received", "wb") as file:
        while part := connection.recv(2**16):
            file.write(part)
elif rank == 0:
    while not os.path.exists("listening"):
        pass
    with socket.create_connection((f"10.77.0.{receiver + 1}", 9000)) as connection:
        connection.sendall(data)
"""
DATA = bytes(range(256)) * 2**13
ECHO = """
import os, socket, time
own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
own.bind(("", 9000))
own.settimeout(60)
if os.environ["RANK"] == "1":
    open("listening", "w").close()
    data, sender = own.recvfrom(1)
    own.sendto(data, sender)
else:
    while not os.path.exists("listening"):
        pass
    start = time.monotonic()
    own.sendto(b"x", ("10.77.0.2", 9000))
    own.recv(1)
    open("seconds", "w").write(str(time.monotonic() - start))
"""


def rate_at(namespace: str, interface: str) -> int | None:
    """The rate of a token bucket in bits per second; ``None`` without a token bucket."""
    shown = json.loads(namespaces.run_tool("tc", "-json", "-n", namespace, "qdisc", "show", "dev", interface))
    rates = [each["options"]["rate"] * 8 for each in shown if each["kind"] == "tbf"]
    return rates[0] if rates else None


# -------------------------------------------------------------------- descriptions


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks must be from 1 to 250, got 0"),
        ({"ranks": 251}, "ranks must be from 1 to 250, got 251"),
        ({"ranks": 3, "ranks_per_machine": 2}, "divide ranks = 3, got 2"),
        ({"ranks": 3, "ranks_per_machine": 0}, "at least 1.*got 0"),
        ({"rate": "fast"}, "rate must be written.*got 'fast'"),
        ({"rate": "0mbit"}, "rate must be written"),
        ({"rate": "1 gbit"}, "rate must be written"),
        ({"rate": "1gbit; reboot"}, "rate must be written"),
        ({"local_rate": "1gbit"}, "local_rate needs more than one rank per machine"),
        ({"ranks_per_machine": 2, "local_rate": "fast"}, "rate must be written.*got 'fast'"),
        ({"delay_s": -0.1}, "delay must be from 0 to 10 s, got -0.1"),
        ({"delay_s": float("nan")}, "delay must be from 0 to 10 s, got nan"),
        ({"rate_of": {2: "1gbit"}}, "a rank, 0 to 1, or by a machine, machine0 to machine1; got 2"),
        ({"rate_of": {"machine2": "1gbit"}}, "got 'machine2'"),
        ({"rate_of": {1: "slow"}}, "rate must be written.*got 'slow'"),
        ({"rate_of": {1: "1gbit", "machine1": "1gbit"}}, "same link twice: rank 1 is alone on machine1"),
    ],
)
def test_descriptions_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        Network(**{"ranks": 2} | arguments)


def test_ranks_find_their_machines():
    """Programs with levels place rank and machine as :class:`Topology` does."""
    network, topology = Network(6, ranks_per_machine=2), Topology(3, 2)
    for rank in range(6):
        environment = network.environment(rank, 29500)
        assert {name: int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")} == {
            "RANK": rank,
            "WORLD_SIZE": 6,
            "LOCAL_WORLD_SIZE": topology.size(Level.INTRA),
        }
        assert int(environment["LOCAL_RANK"]) == topology.index(Level.INTRA, rank)
        assert int(environment["GROUP_RANK"]) == topology.index(Level.INTER, rank)
        assert int(environment["GROUP_WORLD_SIZE"]) == topology.size(Level.INTER)
        assert environment["MASTER_ADDR"] == network.address(0)


def test_ranks_have_one_thread_unless_the_user_says_otherwise(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert Network(2).environment(0, 29500)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert Network(2).environment(0, 29500)["OMP_NUM_THREADS"] == "3"


def test_a_link_can_have_its_own_rate():
    network = Network(3, "1gbit", rate_of={1: "10mbit", "machine2": "20mbit"})
    assert [network.rate_of_rank(rank) for rank in range(3)] == ["1gbit", "10mbit", "20mbit"]
    network = Network(4, "1gbit", 2, "10gbit", rate_of={1: "1mbit", "machine1": "2mbit"})
    assert [network.rate_of_rank(rank) for rank in range(4)] == ["10gbit", "1mbit", "10gbit", "10gbit"]
    assert [network.rate_of_machine(machine) for machine in range(2)] == ["1gbit", "2mbit"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "fast"], "rate must be written"),
        (["--rate-of", "1"], "--rate-of must be written"),
        (["--rate-of", "7=1gbit"], "a link is named by a rank"),
        (["--machines", "2", "--ranks-per-machine", "0"], "ranks must be from 1"),
        (["--ranks", "0"], "ranks must be from 1 to 250, got 0"),
        (["--machines", "0"], "ranks must be from 1 to 250, got 0"),
    ],
)
def test_the_command_refuses_networks(capsys, arguments, message):
    assert commands.main(["lab", *arguments, "script.py"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("gckernels lab: ") and message in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--delay", "1"], "argument --delay: a duration must be written like 100us, 1ms or 2.5s; got '1'"),
        (["--at", "5s explode 1"], "argument --at: an event must be written like"),
        (["--ranks", "2", "--machines", "2"], "not allowed with argument"),
    ],
)
def test_the_command_refuses_arguments(capsys, arguments, message):
    assert commands.main(["lab", *arguments, "script.py"]) == 2
    assert message in capsys.readouterr().err


# -------------------------------------------------------------------- networks


def test_two_levels_have_rates_of_their_own(folder):
    with lab.links(Network(4, "100mbit", 2, "1gbit", rate_of={3: "5mbit", "machine1": "10mbit"})) as made:
        assert [rate_at(name, "eth0") for name in made.namespaces] == [10**9, 10**9, 10**9, 5 * 10**6]
        assert [rate_at(name, port) for name in made._inner for port in ("port0", "port1")] == [
            *(10**9, 10**9, 10**9, 5 * 10**6)
        ]
        assert [rate_at(name, "uplink") for name in made._inner] == [10**8, 10**7]
        assert [rate_at(made._outer, port) for port in ("port0", "port1")] == [10**8, 10**7]


@pytest.mark.parametrize("receiver", [1, 2])
def test_ranks_of_a_machine_do_not_use_its_link(folder, receiver):
    with lab.links(Network(4, ranks_per_machine=2)) as made:
        assert made.run(script(folder, SEND), str(receiver), timeout_s=WAIT_S) == [0, 0, 0, 0]
        sent = [made[place].sent_nbytes() for place in (0, "machine0")]
    assert (folder / "received").read_bytes() == DATA
    assert sent[0] > len(DATA)
    assert sent[1] < 10_000 if receiver == 1 else sent[1] > len(DATA)


def test_the_command_runs_two_levels(folder, capfd):
    text = "import os; open(os.environ['GROUP_RANK'] + os.environ['LOCAL_RANK'], 'w').close()"
    arguments = ["--machines", "2", "--ranks-per-machine", "2", "--rate", "100mbit", "--local-rate", "1gbit"]
    assert (
        commands.main(["lab", *arguments, "--at", "0s cut machine1", str(script(folder, text)), "--rate", "mine"]) == 0
    )
    assert {path.name for path in folder.iterdir()} == {"00", "01", "10", "11", "script.py"}
    assert "gckernels lab: 0s cut machine1\n" in capfd.readouterr().err


def test_packets_are_delayed(folder):
    with lab.links(Network(2, delay_s=0.05)) as made:
        assert made.run(script(folder, ECHO), timeout_s=WAIT_S) == [0, 0]
    assert float((folder / "seconds").read_text()) >= 2 * 0.05


@pytest.mark.parametrize("rate", ["none", pytest.param("100mbit", marks=pytest.mark.slow)])
def test_delayed_bytes_arrive_as_they_were(folder, rate):
    """Without a rate, frames have up to 64 KiB and no checksum yet; a small token bucket cuts them to packets."""
    with lab.links(Network(4, rate, 2, delay_s=0.001)) as made:
        assert made.run(script(folder, SEND), "3", timeout_s=WAIT_S) == [0, 0, 0, 0]
    assert hashlib.sha256((folder / "received").read_bytes()).digest() == hashlib.sha256(DATA).digest()


def test_a_switch_that_ends_is_an_error(folder):
    with lab.links(Network(2, delay_s=0.001)) as made:
        os.kill(made.switch_pid, 9)
        with pytest.raises(LinksError, match="the switch that delays packets has ended"):
            made.run(script(folder, "import time; time.sleep(1000)"))
