"""The order in which the collectives of several communicators are put onto the devices of all ranks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence


def first_difference(orders: Sequence[Sequence[str]]) -> str:
    """The place at which the orders of some ranks do not fit together; an empty text if there is none.

    Kernels of two communicators may wait for each other where one device begins with the first and another one with the
    second, so NCCL asks for one order.

    Args:
        orders: for each rank, the communicators of its collectives, in order.
    """
    left = [deque(_numbered(order)) for order in orders]
    to_come = Counter(each for order in left for each in order)
    while any(left):
        heads = Counter(order[0] for order in left if order)
        ready = {head for head, count in heads.items() if count == to_come[head]}
        if not ready:
            places = [f"rank {rank}: {order[0]}" for rank, order in enumerate(left) if order]
            return "; ".join(places)
        for order in left:
            if order and order[0] in ready:
                order.popleft()
    return ""


def _numbered(order: Sequence[str]) -> list[tuple[str, int]]:
    counts: Counter[str] = Counter()
    numbered = []
    for name in order:
        numbered.append((name, counts[name]))
        counts[name] += 1
    return numbered
