"""A program: a switch that forwards every frame after a delay.

    ip netns exec NAMESPACE python delay_switch.py DELAY_S PORT PORT ...

Some kernels have no ``netem``, so this program takes the place of a bridge. It reads the frames that arrive at each
port, keeps them for the delay, and sends them from the port behind which it has last seen the receiver. Frames arrive
as the sender has made them, with up to 64 KiB, except where a token bucket has cut them to packets. It prints a line
when it is ready.
"""

from __future__ import annotations

import collections
import contextlib
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

ETH_P_ALL = 3  # constants of <linux/if_packet.h>
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
BUFFER_NBYTES = 64 * 2**20
FRAME_NBYTES = 2**17
HEADER_NBYTES = 10  # struct virtio_net_hdr: how to cut a large frame, and which checksum is still missing
ADDRESS_NBYTES = 6
BATCH = 64  # frames that are read from a port before the others get their turn


def open_port(name: str) -> socket.socket:
    """A socket that reads and writes whole frames of an interface."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER_NBYTES)
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_NBYTES)
    port.bind((name, ETH_P_ALL))
    port.setblocking(False)
    return port


def forward(delay_s: float, ports: list[socket.socket]) -> None:
    """Forward frames until the process is killed."""
    behind: dict[bytes, socket.socket] = {}  # the port of every sender
    waiting: collections.deque[tuple[float, socket.socket, bytes]] = collections.deque()  # all wait equally long
    buffer = bytearray(FRAME_NBYTES)
    receiver_at, sender_at = HEADER_NBYTES, HEADER_NBYTES + ADDRESS_NBYTES
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for port in select.select(ports, [], [], timeout)[0]:
            for _ in range(BATCH):
                try:
                    nbytes = port.recv_into(buffer)
                except OSError:  # no more frames, or the link is cut
                    break
                behind[bytes(buffer[sender_at : sender_at + ADDRESS_NBYTES])] = port
                waiting.append((time.monotonic() + delay_s, port, bytes(buffer[:nbytes])))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, arrived, frame = waiting.popleft()
            receiver = behind.get(frame[receiver_at : receiver_at + ADDRESS_NBYTES])
            for port in ports if receiver is None else [receiver]:
                if port is not arrived:
                    with contextlib.suppress(OSError):  # the queue is full, or the link is cut: the frame is lost
                        port.send(frame)


if __name__ == "__main__":
    opened = [open_port(name) for name in sys.argv[2:]]
    os.setpriority(os.PRIO_PROCESS, 0, -20)  # frames are on time although the ranks keep all cores busy
    Path("/proc/self/timerslack_ns").write_text("1000")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the ranks may still want to say something
    print("ready", flush=True)
    forward(float(sys.argv[1]), opened)
