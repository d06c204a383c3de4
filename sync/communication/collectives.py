"""Collectives under the names of every release of torch, and exchanges of flags and texts."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gckernels.devices import device_here

_TEXT_NBYTES = 4096
CONSEQUENCES = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
"""Parts of errors that a rank has because another one has failed before."""
_LONGEST_NBYTES = 2**28

# torch 2.13 deprecates the older names, torch 2.11 has only those
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def device_of_group(group: dist.ProcessGroup) -> torch.device:
    """The device of the gradients that a group averages: this process's device if the group has a backend for
    it, otherwise the CPU. Names of backends do not say it, because the same one may have several."""
    types = {device.type for device in group._device_types}
    here = device_here()
    if here.type in types and group._get_backend(torch.device(here.type)).name() != dist.Backend.GLOO:
        return here
    return torch.device("cpu")


def on_any_rank(group: dist.ProcessGroup, device: torch.device, *flags: bool) -> list[bool]:
    """For each flag whether it is true on any rank. Collective: it returns when all ranks have called it.

    Args:
        group: all ranks.
        device: a device whose tensors the group can send.
        flags: the flags of this rank.
    """
    if dist.get_world_size(group) == 1:
        return list(flags)
    sent = torch.tensor(flags, dtype=torch.int32, device=device)
    dist.all_reduce(sent, op=dist.ReduceOp.MAX, group=group)
    return [bool(flag) for flag in sent.tolist()]


def exchange_text(group: dist.ProcessGroup, device: torch.device, text: str) -> list[str]:
    """The texts of all ranks, in rank order. Collective; nothing is unpickled.

    Args:
        group: all ranks.
        device: a device whose tensors the group can send.
        text: the text of this rank, cut to 4096 bytes of UTF-8.
    """
    encoded = text.encode()[:_TEXT_NBYTES].ljust(_TEXT_NBYTES, b"\0")
    sent = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    received = torch.empty(dist.get_world_size(group), _TEXT_NBYTES, dtype=torch.uint8, device=device)
    all_gather(received.view(-1), sent.to(device), group=group)
    return [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in received.cpu()]


def broadcast_text(group: dist.ProcessGroup, device: torch.device, source: int, text: str) -> str:
    """The text of one rank, of any length up to 256 MiB. Collective; nothing is unpickled.

    Args:
        group: all ranks.
        device: a device whose tensors the group can send.
        source: the rank in the group.
        text: the text of this rank.

    Raises:
        RuntimeError: it is longer. Every rank raises.
    """
    encoded = text.encode()
    length = torch.tensor([len(encoded)], dtype=torch.int64, device=device)
    dist.broadcast(length, group_src=source, group=group)
    if not 0 <= (numel := int(length)) <= _LONGEST_NBYTES:
        raise RuntimeError(f"gckernels: rank {source} says that it sends a text of {numel:,} bytes, which is too long")
    is_source = dist.get_rank(group) == source
    sent = torch.empty(numel, dtype=torch.uint8, device="cpu")
    if is_source and numel:
        sent = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
    received = sent.to(device)
    if numel:
        dist.broadcast(received, group_src=source, group=group)
    return bytes(received.cpu().numpy()).decode(errors="replace")
