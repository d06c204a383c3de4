"""The end of connections after a failure."""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

_NO_TAG = 1 << 16  # no exchange has it


def hang_up(group: dist.ProcessGroup) -> None:
    """Close the connections of this rank in a group of Gloo, so that ranks that wait for it there fail.

    A group that is destroyed keeps its connections as long as anything refers to its operations, as the traceback of an
    error does. Gloo itself closes all of them when a receive times out.
    """
    if dist.get_backend(group) != dist.Backend.GLOO:
        return
    for other in range(group.size()):
        if other != group.rank():
            with suppress(RuntimeError):
                received = torch.empty(1, dtype=torch.uint8, device="cpu")
                work = dist.irecv(received, group=group, group_src=other, tag=_NO_TAG)
                assert work is not None
                work.wait(timedelta(milliseconds=1))
