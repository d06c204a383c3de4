"""The states of front ends in checkpoints of ``torch.distributed.checkpoint`` (DCP).

A front end of updates has a state of its own on each rank, such as the moments of its optimizer. DCP keeps one of the
values with the same name, so each rank saves its state under a name of its own, as bytes. Entries that are the same on
all ranks are saved once.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

from ..frontends.frontend import UPDATES

_COMMON, _SAME = "all ranks", ("anchors", "outer")


def saved_states(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """The values that a rank saves of the state of its front end, which has updates or nothing."""
    if UPDATES not in state:
        return {}
    own = {name: each for name, each in state[UPDATES].items() if name not in _SAME}
    same = {name: state[UPDATES][name] for name in _SAME}
    return {UPDATES: {_COMMON: _packed(same), _name(rank): _packed(own)}}


def state_targets(ranks: range) -> dict[str, Any]:
    """The values into which DCP loads the states of some ranks."""
    return {UPDATES: dict.fromkeys((_COMMON, *map(_name, ranks)), b"")}


def loaded_states(state_dict: Mapping[str, Any], ranks: range) -> list[dict[str, Any]]:
    """The states of some ranks, which DCP has loaded, as front ends read them.

    Raises:
        ValueError: a state is missing or damaged.
    """
    found = state_dict.get(UPDATES, {})
    same = _unpacked(found.get(_COMMON), _COMMON)
    return [{"rank": rank, UPDATES: same | _unpacked(found.get(_name(rank)), _name(rank))} for rank in ranks]


def _name(rank: int) -> str:
    return f"rank {rank}"


def _packed(state: dict[str, Any]) -> bytes:
    packed = io.BytesIO()
    torch.save(state, packed)
    return packed.getvalue()


def _unpacked(packed: Any, name: str) -> dict[str, Any]:
    try:
        # DCP has unpickled the checkpoint already, and states of optimizers may have values of any type
        state: dict[str, Any] = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)
        return {**state}
    except Exception as error:
        raise ValueError(f"checkpoint: the state of {name} has not been loaded, or is damaged") from error
