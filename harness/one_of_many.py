"""The messages that one of many ranks would send, built without the other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast
from unittest import mock

import torch
import torch.distributed as dist

from gckernels import sync
from gckernels.sync.communication.communicators import DryCommunicators
from gckernels.sync.engine import runtime
from gckernels.sync.frontends.members import Members
from gckernels.sync.frontends.module.buckets import Layouts
from gckernels.sync.messages.message import Message


@dataclass(frozen=True)
class OneOfMany(DryCommunicators):
    """Communicators from which the runtime of one rank of many is made.

    Attributes:
        phases: number of collectives of the longest program; none is started.
        offloads: whether some collectives send from the host of a device.
    """

    phases: int = 0
    offloads: bool = False


def transformer(layers: int, hidden: int, device: torch.device | str) -> dict[str, torch.nn.Parameter]:
    """The parameters of a transformer by name, twelve for each layer."""

    encoder = [
        torch.nn.TransformerEncoderLayer(hidden, 8, 4 * hidden, dtype=torch.float32, device=device)
        for _ in range(layers)
    ]
    return dict(torch.nn.ModuleList(encoder).named_parameters())


@contextlib.contextmanager
def alone(communicators: OneOfMany) -> Iterator[None]:
    """Make a runtime inside the ``with`` block the runtime of one rank of many, without the other ranks."""
    with contextlib.ExitStack() as stack:
        for name in ("rank", "world_size"):
            stack.enter_context(
                mock.patch.object(dist, f"get_{name}", lambda _, name=name: getattr(communicators, name))
            )
        stack.enter_context(mock.patch.object(runtime, "Communicators", lambda *_: communicators))
        stack.enter_context(mock.patch.object(runtime, "DeviceLanes", mock.Mock()))
        yield


def built(
    plan: sync.Plan, parameters: Mapping[str, torch.nn.Parameter], communicators: OneOfMany, bucket_cap_mb: float
) -> list[Message]:
    """The messages of an attachment, in the order in which they are launched."""
    device = next(iter(parameters.values())).device
    messages: list[Message] = []
    with alone(communicators):
        executed = runtime.Runtime(plan, cast(dist.ProcessGroup, None), device, seed=0, start_step=0)
        executed.first_is_dense = False
        members = Members(torch.nn.Module(), parameters)
        for bucket in Layouts(executed, members, bucket_cap_mb * 2**20).of(frozenset(parameters)):
            messages += bucket.messages.now()
    return messages
