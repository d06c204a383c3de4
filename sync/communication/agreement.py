"""Agreement of all ranks: that all have the same settings, and that none has failed."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .collectives import CONSEQUENCES, all_gather, device_of_group, exchange_text

T = TypeVar("T")

_TEXTS_LIMIT = 2**20
_SETTINGS = re.compile(r"settings: [0-9a-f]+ ([0-9]+) (.*)", re.DOTALL)


class Disagreement(RuntimeError):
    """Raised on all ranks together if their texts differ."""


@dataclass(frozen=True)
class Failure:
    """The outcome of work that has failed on some rank, the same on all ranks."""

    text: str  # the error, with the rank that has raised it


@contextlib.contextmanager
def named(group: dist.ProcessGroup, what: str, names: Sequence[str] = (), step: int | None = None) -> Iterator[None]:
    """A context for a collective that belongs to no message. Its error names the ranks that have not taken part.

    Args:
        group: the ranks.
        what: the collective, for errors.
        names: the names of what is sent in it.
        step: the training step; ``None`` if it belongs to none.
    """
    try:
        yield
    except RuntimeError as error:
        report = ""
        with contextlib.suppress(Exception):  # the group may be gone
            from . import reports

            report = reports.explained(group, what, names, step, error)
        raise RuntimeError(
            f"gckernels: {what} failed: {report and f'{report}: '}{type(error).__name__}: {error}"
        ) from error


def together(group: dist.ProcessGroup, device: torch.device, work: Callable[[], T]) -> T | Failure:
    """The result of ``work`` on this rank if it returns on all ranks, otherwise a :class:`Failure`. Collective.

    Args:
        group: all ranks.
        device: a device whose tensors the group can send.
        work: what every rank does, without using ``group``.

    Raises:
        RuntimeError: a rank is gone.
    """
    result, report = None, ""
    try:
        result = work()
    except Exception as error:
        report = f"{type(error).__name__}: {error}"
    with named(group, "the comparison of errors"):
        texts = exchange_text(group, device, report)
    failed = [(rank, text) for rank, text in enumerate(texts) if text]
    if failed:
        causes = [each for each in failed if not any(words in each[1] for words in CONSEQUENCES)]
        rank, text = (causes or failed)[0]
        return Failure(f"{text} (rank {rank})")
    assert result is not None
    return result


def agreed(
    caller: str, group: dist.ProcessGroup, device: torch.device, check: Callable[[], tuple[T, Sequence[str]]]
) -> T:
    """The result of ``check``, if it returns on every rank, with the same texts. Collective.

    A rank on which ``check`` raises still takes part in the exchange, because the others wait for it. If nothing is
    wrong, the exchange is one small collective.

    Args:
        caller: name of the calling function, for errors.
        group: all ranks.
        device: a device whose tensors the group can send.
        check: returns a result, and texts that must be the same on all ranks: a summary, which errors show whole, and
            any number of details, of which errors show the first that differs.

    Raises:
        Exception: ``check`` has raised it on this rank.
        Disagreement: the texts differ. Every rank raises.
        RuntimeError: ``check`` has raised on another rank. Every rank raises.
    """
    problem, result = None, None
    texts: Sequence[str] = [""]
    try:
        result, texts = check()
    except Exception as error:  # functions of the user are called, too, and may raise anything
        problem = error
    hashes = [_hash(text) for text in texts]
    report = f"problem: {problem}" if problem else f"settings: {_hash(str(hashes)):x} {len(texts)} {texts[0]}"
    with named(group, f"{caller}: the comparison of settings"):
        reports = exchange_text(group, device, report)
    if problem is not None:
        raise problem
    for rank, text in enumerate(reports):
        if text.startswith("problem: "):
            raise RuntimeError(f"{caller}: failed on rank {rank}: {text.removeprefix('problem: ')}")
    if len(set(reports)) > 1:
        lengths, summaries = zip(*(_read_report(caller, *each) for each in enumerate(reports)), strict=True)
        message = f"{caller}: the ranks do not have the same settings:{_listed(summaries)}"
        first = _first_difference(hashes, lengths, group, device)
        if first:
            differing = texts[first] if first < len(texts) else "nothing"
            message += f"\nfirst difference:{_listed(exchange_text(group, device, differing))}"
        raise Disagreement(message)
    assert result is not None
    return result


def device_of(model: Any) -> torch.device:
    """The device of a model's gradients; for anything else, the device of the default group."""
    if isinstance(model, torch.nn.Module):
        for parameter in model.parameters():
            if not parameter.is_meta:
                return parameter.device
    return device_of_group(dist.distributed_c10d._get_default_group())


def _listed(texts: Sequence[str]) -> str:
    return "".join(f"\n  rank {rank}: {text}" for rank, text in enumerate(texts))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def _read_report(caller: str, rank: int, report: str) -> tuple[int, str]:
    """The number of texts of a rank and its summary. The number allocates memory, so it is checked; all ranks have
    received the same, and raise together."""
    found = _SETTINGS.fullmatch(report)
    if found is None:
        raise RuntimeError(f"{caller}: rank {rank} has sent no settings, but {report!r:.80}")
    if len(found[1]) > len(str(_TEXTS_LIMIT)) or not 1 <= int(found[1]) <= _TEXTS_LIMIT:
        raise RuntimeError(
            f"{caller}: rank {rank} says that it has {found[1]:.40} settings, and {_TEXTS_LIMIT:,} are most"
        )
    return int(found[1]), found[2]


def _first_difference(hashes: list[int], lengths: Sequence[int], group: dist.ProcessGroup, device: torch.device) -> int:
    """Index of the first text after the summary that differs between ranks; 0 if there is none. Collective."""
    mine = torch.full((max(lengths),), -1, dtype=torch.int64, device="cpu")
    mine[: len(hashes)] = torch.tensor(hashes, dtype=torch.int64, device="cpu")
    everyone = torch.empty(len(lengths), max(lengths), dtype=torch.int64, device=device)
    all_gather(everyone.view(-1), mine.to(device), group=group)
    differs = (everyone != everyone[0]).any(0)[1:].tolist()
    return differs.index(True) + 1 if any(differs) else 0
