"""The header of what ``torch.distributed.checkpoint`` (DCP) saves: what it says, and under which name it is.

It is a JSON text, the same on all ranks: the step, the plan, the number of ranks, and the units of which there is
something. DCP keeps one of all values with the same name. So what a part of the ranks saves, as other parts may do, is
under a name that has the first of its ranks in it.
"""

from __future__ import annotations

import json
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from .jobs import Job, read_header

HEADER = "gckernels"
"""The name of the header, beside the kinds of what is remembered."""
GROUP = "group_of_rank_"
"""The prefix of the names of groups."""
FORMAT, VERSION = "gckernels.checkpoint", 1


def text_of(state: dict[str, Any]) -> str:
    """The header of a job, from the state of one of its ranks."""
    head = {"format": FORMAT, "version": VERSION}
    return json.dumps(head | {name: state[name] for name in ("step", "world_size", "plan", "units")})


def parse(text: Any) -> Job:
    """The job that a header is of, without what its ranks remember.

    Raises:
        ValueError: it is no header, or damaged.
    """
    try:
        record = json.loads(text)
        known = (record["format"], record["version"]) == (FORMAT, VERSION)
    except (KeyError, TypeError, ValueError):
        known = False
    if not known:
        raise ValueError(f"checkpoint: {HEADER!r} must be a header of format {FORMAT!r}, version {VERSION}")
    return read_header(record)


def name_of_group(group: dist.ProcessGroup) -> str:
    """A name that no other part of the ranks has; none if the group has all ranks."""
    ranks = dist.get_process_group_ranks(group)
    return "" if len(ranks) == dist.get_world_size() else f"{GROUP}{ranks[0]}"


def find_header(metadata: Metadata, key: str | None, group: str) -> str:
    """The name under which a header was saved.

    Args:
        metadata: of the checkpoint.
        key: of the dict that was saved; needed where there are several with a header.
        group: what :func:`name_of_group` says of the ranks that load; needed where several groups have saved.

    Raises:
        ValueError: there is none, or it cannot be told which one.
    """
    texts = [name for name, each in metadata.state_dict_metadata.items() if isinstance(each, BytesStorageMetadata)]
    names = [name for name in texts if f".{name}".endswith(f".{HEADER}")]
    keys = list(dict.fromkeys(split(name)[0] for name in names))
    listed = ", ".join(map(repr, keys)) or "none"
    if key is not None and key not in keys:
        raise ValueError(f"checkpoint: key is {key!r}, what was saved of gckernels is under {listed}")
    if key is None and len(keys) != 1:
        raise ValueError(f"checkpoint: what was saved of gckernels is under {listed}; key must name one of several")
    groups = {split(name)[1]: name for name in names if split(name)[0] == (keys[0] if key is None else key)}
    if len(groups) > 1 and group not in groups:
        raise ValueError(f"checkpoint: {', '.join(sorted(groups))} have saved, and this is {group or 'all ranks'}")
    return groups.get(group) or next(iter(groups.values()))


def split(name: str) -> tuple[str, str]:
    """The key of the dict that was saved, and the name of the group, if a part of the ranks has saved it."""
    *key, last = name.removesuffix(HEADER).removesuffix(".").split(".")
    return (".".join(key), last) if last.startswith(GROUP) else (".".join([*key, last]), "")
