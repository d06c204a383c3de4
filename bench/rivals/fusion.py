"""Fusion: the best cuts of a model's gradients into groups, each encoded and sent as one.

The model is that of Cupcake (Wang et al., 2023) and MergeComp (Wang et al., 2021). Gradients are ready one after the
other. The encoding of a group delays the rest of backward. Groups are sent one after the other over one link. A group
is a run of neighbours, so ``n`` gradients can be cut in ``2 ** (n - 1)`` ways.

Where the time to encode a group is a constant plus a sum over its gradients, the end of an encoding depends only on the
last gradient and the number of groups. Then dynamic programming over both is exact (:func:`best_groups`). For any other
time, :func:`best_groups_of_any` keeps all states that no other state beats in both times.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gckernels.planner.machines.machine import Floats

_TAIL = 64
"""Gradients, the last ones, whose groups are bounded before all others."""


@dataclass(frozen=True)
class Groups:
    """The result of a search.

    Attributes:
        ends: for each group the number of the gradient behind its last one, in order.
        step_s: seconds from the start of backward until the last group is sent.
    """

    ends: tuple[int, ...]
    step_s: float


def group_time(backward_s: Floats, encode_s: Floats, send_s: Floats, ends: tuple[int, ...]) -> float:
    """Seconds until the last group is sent, for given groups.

    Args:
        backward_s: ``[n]``, seconds of backward for each gradient, in the order in which they are ready.
        encode_s: ``[n + 1, n + 1]``, seconds to encode gradients ``i`` up to, but not including, ``j``.
        send_s: ``[n + 1, n + 1]``, seconds to send them.
        ends: as in :class:`Groups`.
    """
    encoded_s = sent_s = 0.0
    for start, end in zip((0, *ends[:-1]), ends, strict=True):
        encoded_s += float(backward_s[start:end].sum() + encode_s[start, end])
        sent_s = max(sent_s, encoded_s) + float(send_s[start, end])
    return sent_s


def encode_table(fixed_s: float, each_s: Floats) -> Floats:
    """The table of encoding times that are a constant for each group, plus a time for each gradient."""
    total = np.concatenate([[0.0], each_s.cumsum()])
    table: Floats = fixed_s + total[None, :] - total[:, None]
    return table


def best_groups(
    backward_s: Floats, fixed_s: float, each_s: Floats, send_s: Floats, below_s: float = np.inf
) -> Groups | None:
    """The fastest groups where the time to encode a group is ``fixed_s`` plus a time for each gradient.

    Args:
        backward_s: ``[n]``, as for :func:`group_time`; ``n`` is at least 1.
        fixed_s: seconds for each group.
        each_s: ``[n]``, seconds for each gradient.
        send_s: ``[n + 1, n + 1]``, as for :func:`group_time`.
        below_s: groups that are not faster than this are no result.

    Returns:
        The groups; ``None`` if none are faster than ``below_s``.
    """
    num = len(backward_s)
    encoded_s = np.concatenate([[0.0], (backward_s + each_s).cumsum()])
    send_s = np.where(np.tri(num + 1, dtype=bool), np.inf, send_s)
    compute_s = encode_table(fixed_s, backward_s + each_s)
    if num > _TAIL:  # most results that are too slow are so because of their last groups
        tail = slice(num - _TAIL, num + 1)
        last = _Least.of(compute_s[tail, tail], send_s[tail, tail])
        entering_s = send_s[: num - _TAIL, tail].min(axis=0) + last.sent_s  # with the group that reaches the tail
        if (compute_s[0, tail] + np.maximum(entering_s, last.done_s)).min() >= below_s:
            return None
    least = _Least.of(compute_s, send_s)
    if least.done_s[0] >= below_s:
        return None
    # for each number of groups the earliest end of sending, for the gradients up to each one
    rounds = [np.where(np.arange(num + 1) == 0, 0.0, np.inf)]
    best_s, best_count = below_s, 0
    for count in range(1, num + 1):
        ready_s = encoded_s + fixed_s * count
        starts = np.flatnonzero(np.maximum(rounds[-1] + least.sent_s, ready_s - fixed_s + least.done_s) < best_s)
        stops = count + np.flatnonzero((ready_s + least.done_s)[count:] < best_s)
        if not (starts.size and stops.size):  # more groups only take longer to encode
            break
        before, behind = slice(starts[0], starts[-1] + 1), slice(stops[0], stops[-1] + 1)
        times_s = np.maximum(rounds[-1][before, None], ready_s[None, behind]) + send_s[before, behind]
        rounds.append(np.full(num + 1, np.inf))
        times_s.min(axis=0, out=rounds[-1][behind])
        if rounds[-1][num] < best_s:
            best_s, best_count = float(rounds[-1][num]), count
    if not best_count:
        return None
    ends, end = [num], num
    for count in range(best_count, 1, -1):
        end = int((np.maximum(rounds[count - 1], encoded_s[end] + fixed_s * count) + send_s[:, end]).argmin())
        ends.append(end)
    return Groups(tuple(reversed(ends)), best_s)


@dataclass(frozen=True)
class _Least:
    """Lower bounds of what is left at a cut, whatever groups follow.

    Attributes:
        sent_s: ``[n + 1]``, seconds from the moment when everything before the cut is sent.
        done_s: ``[n + 1]``, seconds from the moment when everything before the cut is encoded.
    """

    sent_s: Floats
    done_s: Floats

    @staticmethod
    def of(compute_s: Floats, send_s: Floats) -> _Least:
        """The bounds for groups that take ``compute_s`` for backward and encoding; both are ``[n + 1, n + 1]``."""
        num = len(compute_s) - 1
        sent_s, done_s = np.zeros(num + 1), np.zeros(num + 1)
        for start in range(num - 1, -1, -1):
            behind = slice(start + 1, num + 1)
            all_sent_s = send_s[start, behind] + sent_s[behind]
            sent_s[start] = np.minimum.reduce(all_sent_s)
            done_s[start] = np.minimum.reduce(compute_s[start, behind] + np.maximum(all_sent_s, done_s[behind]))
        return _Least(sent_s, done_s)


def best_groups_of_any(
    backward_s: Floats,
    encode_s: Floats,
    send_s: Floats,
    tolerance: float = 0.0,
    tried: tuple[int, ...] = (),
) -> Groups:
    """The fastest groups for any times of encoding.

    Args:
        backward_s: as for :func:`group_time`.
        encode_s: likewise.
        send_s: likewise.
        tolerance: 0 for the exact optimum. Otherwise states whose times are within this fraction of the result count
            as equal, which makes the search faster.
        tried: the ends of groups that are probably good. States that cannot be better are left out.
    """
    num = len(backward_s)
    backward_to = np.concatenate([[0.0], backward_s.cumsum()])
    even = [tuple(num * (at + 1) // count for at in range(count)) for count in (1, 2, 4, 8, 16, num) if count <= num]
    candidates = [tried] if tried else even
    start = min((Groups(ends, group_time(backward_s, encode_s, send_s, ends)) for ends in candidates), key=_time)
    # one half of the tolerance is for states that count as equal, the other one for results that are hardly better
    below_s, grain_s = start.step_s * (1.0 - tolerance / 2), tolerance / 2 * start.step_s / num
    least = _Least.of(encode_s + backward_to[None, :] - backward_to[:, None], send_s)
    if least.done_s[0] > below_s:
        return start
    fronts: list[_Front] = [_Front.start()]
    earliest_s = np.zeros(num + 1)  # for each cut when the last group is encoded, at the earliest
    for end in range(1, num + 1):
        compute_s = backward_to[end] - backward_to[:end] + encode_s[:end, end]
        rest_s = np.maximum(send_s[:end, end] + least.sent_s[end], least.done_s[end])
        near = int((earliest_s[:end] + compute_s + rest_s <= below_s).argmax())  # no long groups from before
        # the states of all these fronts side by side, each with its cut and its number there
        sizes = [len(front.sent_s) for front in fronts[near:]]
        origin, within = np.repeat(np.arange(near, end), sizes), np.concatenate([*map(np.arange, sizes)])
        encoded_s = np.concatenate([front.encoded_s for front in fronts[near:]]) + compute_s[origin]
        sent_s = np.concatenate([front.sent_s for front in fronts[near:]])
        sent_s = np.maximum(sent_s, encoded_s) + send_s[origin, end]
        useful = np.maximum(encoded_s + least.done_s[end], sent_s + least.sent_s[end]) <= below_s
        fronts.append(_Front.of(encoded_s, sent_s, origin, within, useful, grain_s))
        earliest_s[end] = fronts[end].encoded_s.min(initial=np.inf)
    if not len(fronts[num].sent_s):
        return start
    found = int(fronts[num].sent_s.argmin())
    best_s, ends, end = float(fronts[num].sent_s[found]), [], num
    while end:
        ends.append(end)
        end, found = int(fronts[end].origin[found]), int(fronts[end].within[found])
    best = Groups(tuple(reversed(ends)), best_s)
    return min(best, start, key=_time)


@dataclass(frozen=True)
class _Front:
    """The states at a cut that no other state beats.

    Attributes:
        encoded_s: when the last group is encoded.
        sent_s: when it is sent.
        origin: the cut before the last group.
        within: the number of the state there.
    """

    encoded_s: Floats
    sent_s: Floats
    origin: npt.NDArray[np.intp]
    within: npt.NDArray[np.intp]

    @staticmethod
    def start() -> _Front:
        nowhere = np.zeros(1, dtype=np.intp)
        return _Front(np.zeros(1), np.zeros(1), nowhere, nowhere)

    @staticmethod
    def of(
        encoded_s: Floats,
        sent_s: Floats,
        origin: npt.NDArray[np.intp],
        within: npt.NDArray[np.intp],
        useful: npt.NDArray[np.bool_],
        grain_s: float,
    ) -> _Front:
        kept = np.flatnonzero(useful)
        order = kept[encoded_s[kept].argsort()]  # states that are encoded at the same time may stay
        ends = np.floor(sent_s[order] / grain_s) if grain_s else sent_s[order]
        before = np.minimum.accumulate(np.concatenate([[np.inf], ends]))[:-1]
        order = order[ends < before]
        return _Front(encoded_s[order], sent_s[order], origin[order], within[order])


def _time(groups: Groups) -> float:
    return groups.step_s
