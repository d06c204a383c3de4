"""The header of a checkpoint of ``torch.distributed.checkpoint`` (DCP): its contents and its name.

The header is a JSON text: the step, the plan, the number of ranks, and the units that have been compressed, which are
the same on all ranks, and the figures of one of them. DCP keeps one of the values with the same name. So when several
process groups, each with a part of the ranks, save into one checkpoint, the first rank of each group is part of its
names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from .jobs import MAX_STEPS, NOTES, Job, read_header

HEADER = "gckernels"
"""The name of the header; its siblings are named after the kinds of residuals and factors."""
GROUP = "group_of_rank_"
"""The prefix of the names of groups."""
PARKED = "parked"
"""The name of what plans have left behind; its rows are the parts of the ranks."""
FORMAT, VERSION = "gckernels.checkpoint", 1


def text_of(state: dict[str, Any], parked_sizes: Mapping[str, int]) -> str:
    """The header text of a job, made from the state of one of its ranks.

    Args:
        parked_sizes: the number of elements of each parameter of which something is parked.
    """
    head = {"format": FORMAT, "version": VERSION, "parked": dict(parked_sizes)}
    notes = {name: state[name] for name in (*NOTES, "part") if name in state}
    return json.dumps(head | {name: state[name] for name in ("step", "world_size", "plan", "units")} | notes)


def parse(text: Any) -> Job:
    """The job that a header describes, without residuals and factors.

    Raises:
        ValueError: ``text`` is not a header, or damaged.
    """
    try:
        record = json.loads(text)
        known = (record["format"], record["version"]) == (FORMAT, VERSION)
    except (KeyError, TypeError, ValueError):
        known = False
    if not known:
        raise ValueError(f"checkpoint: the value under {HEADER!r} must be JSON of format {FORMAT!r}, version {VERSION}")
    sizes = record.get("parked", {})
    if not isinstance(sizes, dict) or not all(type(each) is int and 0 <= each <= MAX_STEPS for each in sizes.values()):
        raise ValueError(f"checkpoint: parked must have the sizes of parameters, got {sizes!r}")
    return replace(read_header(record), parked_sizes=sizes)


def name_of_group(group: dist.ProcessGroup) -> str:
    """A name for ``group``, different from those of disjoint groups; empty if the group has all ranks."""
    ranks = dist.get_process_group_ranks(group)
    return "" if len(ranks) == dist.get_world_size() else f"{GROUP}{ranks[0]}"


def part_in(text: str) -> list[Any] | None:
    """The part of the parameters that the ranks of a job had, from its header; ``None`` if they had all."""
    part: list[Any] | None = json.loads(text).get("part")
    return part


def find_headers(metadata: Metadata, key: str | None) -> dict[str, str]:
    """The names under which headers were saved, by the names of the groups that have saved them.

    Args:
        metadata: metadata of the checkpoint.
        key: key under which ``checkpoint()`` was saved; needed if it was saved under several.

    Raises:
        ValueError: the checkpoint has no header, none under ``key``, or several between which nothing decides.
    """
    texts = [name for name, each in metadata.state_dict_metadata.items() if isinstance(each, BytesStorageMetadata)]
    names = [name for name in texts if f".{name}".endswith(f".{HEADER}")]
    keys = list(dict.fromkeys(split(name)[0] for name in names))
    listed = ", ".join(map(repr, keys)) or "none"
    if key is not None and key not in keys:
        raise ValueError(f"checkpoint: nothing was saved by gckernels under key={key!r}, only under {listed}")
    if key is None and not keys:
        raise ValueError("checkpoint: nothing was saved by gckernels in this checkpoint")
    if key is None and len(keys) > 1:
        raise ValueError(f"checkpoint: gckernels has saved under {listed}; pass one of these as key")
    return {split(name)[1]: name for name in names if split(name)[0] == (keys[0] if key is None else key)}


def own_group(texts: Mapping[str, str], group: str, part: list[Any] | None) -> str | None:
    """The name of the group whose job some ranks continue; ``None`` if they have other parts of the parameters, and
    need the jobs of all groups.

    Args:
        texts: headers by the names of groups.
        group: :func:`name_of_group` of the ranks.
        part: the entry of their part; ``None`` if they have all parameters.

    Raises:
        ValueError: several groups have saved a job of whole parameters each, and this group is none of them.
    """
    own = group if group in texts else next(iter(texts)) if len(texts) == 1 else None
    if own is not None and part_in(texts[own]) == part:
        return own
    if all(part_in(text) is None for text in texts.values()) and len(texts) > 1:
        raise ValueError(
            f"checkpoint: saved by the groups {', '.join(sorted(texts))}, but to be loaded by {group or 'all ranks'}"
        )
    return None


def split(name: str) -> tuple[str, str]:
    """The key under which a header was saved, and the name of the group that saved it (empty for all ranks)."""
    *key, last = name.removesuffix(HEADER).removesuffix(".").split(".")
    return (".".join(key), last) if last.startswith(GROUP) else (".".join([*key, last]), "")
