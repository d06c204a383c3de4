"""The links between ranks, measured with plain sockets at the addresses that Gloo would use.

Gloo says little when machines do not reach each other, and late. So all ranks first tell each other their addresses
over the store of the rendezvous, and each tries to connect to the others.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import statistics
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

CONNECT_S = 5.0
"""Seconds in which a connection must come about."""
MEET_S, WAIT_S = 20.0, 60.0
"""Seconds in which all ranks must have met at the store, and those that they wait for each other afterwards."""
PINGS, FIRST_NBYTES, SENDS_S, MAX_NBYTES = 10, 1 << 18, 1.0, 1 << 28
MAX_RANKS = 8
"""The largest number of ranks whose links are measured, one of each machine first."""
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR
_CHUNK = 1 << 18


class LinkError(RuntimeError):
    """Raised on all ranks if ranks cannot reach each other; the message says what to do."""


@dataclass(frozen=True)
class Endpoint:
    """The place at which a rank can be reached."""

    rank: int
    host: str
    address: str
    port: int
    interfaces: Mapping[str, str]  # addresses by name, without the loopback

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host}"

    @property
    def machine(self) -> tuple[str, ...]:
        """The name of its machine and the addresses there: containers may have one name."""
        return self.host, *sorted(self.interfaces.values())

    @property
    def choices(self) -> str:
        """The interfaces of its machine, for people."""
        return ", ".join(f"{name} ({address})" for name, address in self.interfaces.items()) or "none"


@dataclass(frozen=True)
class MeasuredLink:
    """One direction between two ranks."""

    source: Endpoint
    target: Endpoint
    round_trip_s: float
    bit_per_s: float


def measured_links() -> list[MeasuredLink]:
    """The links between all ranks of torchrun, in both directions, or between one rank of each machine if there are
    many. Every rank calls it.

    Raises:
        LinkError: some ranks cannot reach others.
    """
    with _met() as met:
        return links_between(*met)


def links_between(store: Store, rank: int, ranks: int) -> list[MeasuredLink]:
    """The links as :func:`measured_links` returns them, of ranks that have met at a store."""
    with _listening() as (listener, address):
        own = Endpoint(rank, socket.gethostname(), address, listener.getsockname()[1], interfaces())
        everyone = [Endpoint(**each) for each in _exchanged(store, "endpoint", rank, ranks, asdict(own))]
        store.set_timeout(timedelta(seconds=WAIT_S))
        problems = _exchanged(store, "problem", rank, ranks, _problems(own, everyone))
        if any(problems):
            raise LinkError("; ".join(dict.fromkeys(text for texts in problems for text in texts)))
        found = []
        chosen = _chosen(everyone)
        for source in chosen:
            for target in chosen:
                if source != target:
                    taken = _taken(listener, source, target, rank)
                    pair = f"link {source.rank} {target.rank}"
                    (round_trip_s, bit_per_s), *_ = filter(None, _exchanged(store, pair, rank, ranks, taken))
                    found.append(MeasuredLink(source, target, round_trip_s, bit_per_s))
        return found


def interfaces() -> dict[str, str]:
    """The IPv4 addresses of this machine by the names of their interfaces, without the loopback."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, _ADDRESS_OF_INTERFACE, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])
    return {name: address for name, address in found.items() if not address.startswith("127.")}


def _address() -> str:
    """The address at which Gloo would listen: of ``GLOO_SOCKET_IFNAME``, or of the name of this machine.

    Raises:
        LinkError: there is no such interface.
    """
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if wanted == "lo":
        return "127.0.0.1"
    if wanted:
        if wanted not in (found := interfaces()):
            names = ", ".join(found) or "none"
            raise LinkError(f"GLOO_SOCKET_IFNAME must be an interface of {socket.gethostname()}, {names}; got {wanted}")
        return found[wanted]
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


@contextlib.contextmanager
def _listening() -> Iterator[tuple[socket.socket, str]]:
    """A socket that listens where Gloo would, and its address; the loopback if the address is none of this machine."""
    address = _address()
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        try:
            listener.bind((address, 0))
        except OSError:
            address = "127.0.0.1"
            listener.bind((address, 0))
        listener.listen()
        yield listener, address


@contextlib.contextmanager
def _met() -> Iterator[tuple[Store, int, int]]:
    """The store of the rendezvous, with the rank and the number of ranks. Rank 0, which may serve it, leaves last."""
    store, rank, ranks = _store()
    try:
        yield store, rank, ranks
    finally:
        with contextlib.suppress(RuntimeError):
            store.set(f"left {rank}", "")
            if rank == 0:
                store.wait([f"left {each}" for each in range(ranks)], timedelta(seconds=MEET_S))


def _store() -> tuple[Store, int, int]:
    place = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    try:
        store, rank, ranks = next(iter(rendezvous("env://", timeout=timedelta(seconds=MEET_S))))
        prefixed = PrefixStore("gckernels links", store)
        prefixed.set_timeout(timedelta(seconds=MEET_S))
        return prefixed, rank, ranks
    except (RuntimeError, ValueError) as error:
        first = str(error).partition("\n")[0]
        raise LinkError(
            f"the ranks have not met at {place} within {MEET_S:.0f} s ({first}): start all of them, name the machine "
            "of rank 0 by an address that the others reach, and open that port"
        ) from None


def _exchanged(store: Store, name: str, rank: int, ranks: int, value: object) -> list[Any]:
    """The values that all ranks have given under a name. Collective."""
    store.set(f"{name} {rank}", json.dumps(value))
    try:
        return [json.loads(store.get(f"{name} {each}")) for each in range(ranks)]
    except RuntimeError as error:
        raise LinkError(f"a rank has not answered in time ({name}): {error}") from error


def _problems(own: Endpoint, everyone: Sequence[Endpoint]) -> list[str]:
    """The reasons why this rank does not reach others."""
    others = [each for each in everyone if each.machine != own.machine]
    if others and own.address.startswith("127."):
        return [
            f"{own} would listen at {own.address}, where other machines do not reach it: on {own.host} set "
            f"GLOO_SOCKET_IFNAME to the interface of the network that all share, of {own.choices}"
        ]
    found = []
    for other in others:
        if other.address.startswith("127."):
            continue  # it says so itself
        try:
            socket.create_connection((other.address, other.port), CONNECT_S).close()
        except OSError as error:
            found.append(
                f"{own} cannot connect to {other} at {other.address} in {CONNECT_S:.0f} s ({error}): let a firewall "
                f"pass all TCP ports between them, or set GLOO_SOCKET_IFNAME; {other.host} has {other.choices}"
            )
    return found


def _chosen(everyone: Sequence[Endpoint]) -> list[Endpoint]:
    """The ranks whose links are measured: the first of each machine, or all if there is one machine."""
    first = list({each.machine: each for each in reversed(everyone)}.values())[::-1]
    return (list(everyone) if len(first) == 1 else first)[:MAX_RANKS]


def _taken(listener: socket.socket, source: Endpoint, target: Endpoint, rank: int) -> tuple[float, float] | None:
    """The seconds of a round trip and the bits per second, on the source; ``None`` on other ranks."""
    if rank == target.rank:
        _answer(listener)
    if rank != source.rank:
        return None
    with socket.create_connection((target.address, target.port), CONNECT_S) as connection:
        connection.settimeout(WAIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pings_s = [_sent_s(connection, 1) for _ in range(PINGS)]
        round_trip_s = statistics.median(pings_s)
        nbytes = FIRST_NBYTES
        while (passed_s := _sent_s(connection, nbytes)) < SENDS_S and nbytes < MAX_NBYTES:
            nbytes = min(max(int(nbytes * min(1.2 * SENDS_S / passed_s, 8.0)), nbytes + 1), MAX_NBYTES)
        connection.sendall(struct.pack("<q", 0))
    return round_trip_s, 8 * nbytes / max(passed_s - round_trip_s, 1e-9)


def _sent_s(connection: socket.socket, nbytes: int) -> float:
    """The seconds until the other side has received bytes and said so."""
    payload = memoryview(bytes(_CHUNK))
    begun_s = time.perf_counter()
    connection.sendall(struct.pack("<q", nbytes))
    for at in range(0, nbytes, _CHUNK):
        connection.sendall(payload[: min(_CHUNK, nbytes - at)])
    connection.recv(1)
    return time.perf_counter() - begun_s


def _answer(listener: socket.socket) -> None:
    """Receive what the next connection that sends something sends, and confirm each message."""
    listener.settimeout(WAIT_S)
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(WAIT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            messages, room = connection.makefile("rb"), memoryview(bytearray(_CHUNK))
            if not (head := messages.read(8)):
                continue  # one that has only tried to connect
            while (nbytes := struct.unpack("<q", head)[0]) > 0:
                for at in range(0, nbytes, _CHUNK):
                    messages.readinto(room[: min(_CHUNK, nbytes - at)])
                connection.sendall(b"1")
                head = messages.read(8)
            return
