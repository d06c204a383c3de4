"""Dominance: options that are never better than another one, whatever the rest of the step."""

from __future__ import annotations

import numpy as np

from ..machines.machine import Floats
from ..timeline.pricing import Ints
from .rows import BACKWARD, FAR_S, UNUSABLE_S, Rows

_ROUNDING_S = 1e-12


def undominated(rows: Rows) -> Ints:
    """The options for which no other one is as good for every item, whatever the rest of the step.

    One option is as good as another if its stages need the same lanes, and every one of them needs its lane no later
    and ends no later, and it has no more work on any resource.
    """
    waits = rows.before_s.min(axis=0) < FAR_S
    same: dict[bytes, list[int]] = {}
    for option in range(rows.lanes.shape[1]):
        same.setdefault(rows.lanes[:, option].tobytes() + waits[:, option].tobytes(), []).append(option)
    kept: list[int] = []
    for members in same.values():
        kept += _front(_costs(rows, members), members) if len(members) > 1 else members
    return np.array(sorted(kept), dtype=np.intp)


def _costs(rows: Rows, members: list[int]) -> Floats:
    """``[members, costs]``, everything in which one of the members, which need the same lanes, may be better.

    The costs of all options at once would be several times as large as the rows.
    """
    before_s, after_s = rows.before_s[:, :, members], rows.after_s[:, :, members]
    rest_s = after_s[..., :1] - rows.first_s[None, :, members, None]
    ends_s = after_s - np.where(rows.lanes[:, members] == BACKWARD, rest_s, 0.0)
    waits = before_s < FAR_S
    starts_s = np.concatenate([np.zeros_like(rest_s), ends_s[..., :-1]], axis=3)
    leads_s = np.where(waits, before_s - starts_s, 0.0)
    loads_s = ends_s - np.where(waits, before_s, starts_s)
    shape = (len(members), len(before_s), -1)
    costs = [np.moveaxis(each, 2, 0).reshape(shape) for each in (rest_s, leads_s, loads_s)]
    table: Floats = np.concatenate([*costs, np.moveaxis(rows.work_s[:, members], 1, 0)], axis=2)
    table[(after_s[:, 0, :, 0] >= UNUSABLE_S).T] = UNUSABLE_S
    return table.reshape(len(members), -1)


def _front(costs: Floats, members: list[int]) -> list[int]:
    """The members for which no other one is as cheap in all columns; the first one of equals."""
    front: list[int] = []
    order = np.argsort(costs.sum(axis=1), kind="stable")
    for each in order:
        if not any((costs[other] <= costs[each] + _ROUNDING_S).all() for other in front):
            front.append(int(each))
    return [members[each] for each in front]
