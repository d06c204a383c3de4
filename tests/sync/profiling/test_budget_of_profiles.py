"""The budget of a profile: what takes longer than expected is cut off, on all ranks together."""

from __future__ import annotations

import torch
import torch.distributed as dist

from gckernels.sync import Topology
from gckernels.sync.communication.ranks import Budget, Ranks, TimedRanks
from gckernels.sync.profiling.measurements.session import MeasurementExtent, Session
from gckernels.sync.resources.memory_spaces import Places
from ranks import run_ranks, values_of

CPU = torch.device("cpu")


def cut_off(late: int) -> tuple[list[int], list[str], list[float]]:
    """The rounds of three parts that are expected to be short, what was left out, and what the ranks still agree on.
    The second part never ends; only the clock of one rank shows it."""
    now_s = 0.0
    group = dist.distributed_c10d._get_default_group()
    budget = Budget(10.0, Ranks(group, CPU), lambda: now_s)
    ranks = TimedRanks(group, CPU, lambda: budget.is_over)
    session = Session(ranks, budget, Places.of(CPU), Topology(2), MeasurementExtent(), lambda share, name: None)
    rounds = [0, 0, 0]

    def measure(part: int, most: int) -> None:
        nonlocal now_s
        while rounds[part] < most:
            ranks.meet()
            rounds[part] += 1
            now_s += float(dist.get_rank() == late)

    for part, most in enumerate((2, 1000, 2)):
        session.part("kind", f"part {part}", lambda part=part, most=most: measure(part, most), 1.0)
    return rounds, session.left_out, Ranks(group, CPU).slowest([float(dist.get_rank())])


def test_what_never_ends_is_cut_off_on_all_ranks_as_soon_as_one_is_late():
    for late in (0, 1):
        first, second = values_of(run_ranks(2, cut_off, late))
        assert first == second
        rounds, left_out, agreed = first
        assert rounds[:2] == [2, 9] and agreed == [1.0]
        assert left_out[0] == "part 1: it took too long" and left_out[1].startswith("part 2")
