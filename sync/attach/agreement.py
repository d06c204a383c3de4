"""Before anything is built: every rank is without a problem, and all have the same settings."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..resources.communicators import all_gather, exchange_text

T = TypeVar("T")


def agreed(
    what: str, group: dist.ProcessGroup, device: torch.device, check: Callable[[], tuple[T, Sequence[str]]]
) -> T:
    """What ``check`` returns, when it returns on every rank, with the same texts.

    Every rank of ``group`` calls this. A rank on which ``check`` raises takes part in the exchange all the same: the
    others are waiting in it. Where all are the same, that takes one small collective.

    Args:
        what: the name of the caller, for errors.
        group: all ranks.
        device: on which the group can talk.
        check: returns what is agreed upon, and texts that must be the same on all ranks: first a summary, which errors
            show whole, then any number of details, of which they show the first that differs.

    Raises:
        Exception: what ``check`` has raised on this rank.
        RuntimeError: it has raised on another rank, or the texts are not the same. Every rank raises.
    """
    problem, result = None, None
    texts: Sequence[str] = [""]
    try:
        result, texts = check()
    except Exception as error:  # of the caller's functions, too: any
        problem = error
    hashes = [_hash(text) for text in texts]
    said = f"problem: {problem}" if problem else f"settings: {_hash(str(hashes)):x} {len(texts)} {texts[0]}"
    heard = exchange_text(group, device, said)
    if problem is not None:
        raise problem
    for rank, text in enumerate(heard):
        if text.startswith("problem: "):
            raise RuntimeError(f"{what}: rank {rank} could not {what}: {text.removeprefix('problem: ')}")
    if len(set(heard)) > 1:
        summaries = [text.split(" ", 3)[3] for text in heard]
        message = f"{what}: the ranks do not have the same settings:{_listed(summaries)}"
        lengths = [int(text.split(" ", 3)[2]) for text in heard]
        first = _first_difference(hashes, lengths, group, device)
        if first:
            differing = texts[first] if first < len(texts) else "nothing"
            message += f"\nfirst difference:{_listed(exchange_text(group, device, differing))}"
        raise RuntimeError(message)
    assert result is not None
    return result


def device_of(model: Any) -> torch.device:
    """Where the gradients are; for what is not a model, where the default group can talk."""
    if isinstance(model, torch.nn.Module):
        for parameter in model.parameters():
            if not parameter.is_meta:
                return parameter.device
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _listed(texts: Sequence[str]) -> str:
    return "".join(f"\n  rank {rank}: {text}" for rank, text in enumerate(texts))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def _first_difference(hashes: list[int], lengths: list[int], group: dist.ProcessGroup, device: torch.device) -> int:
    """The first of the texts behind the summary that is not the same on all ranks; 0 when there is none."""
    mine = torch.full((max(lengths),), -1, dtype=torch.int64)
    mine[: len(hashes)] = torch.tensor(hashes, dtype=torch.int64)
    everyone = torch.empty(len(lengths), max(lengths), dtype=torch.int64, device=device)
    all_gather(everyone.view(-1), mine.to(device), group=group)
    differs = (everyone != everyone[0]).any(0)[1:].tolist()
    return differs.index(True) + 1 if any(differs) else 0
