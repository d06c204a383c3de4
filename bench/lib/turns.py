"""Turns of arms: several steps of one arm in a row, with their time, bytes and CPU time; and what many turns say."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from bench.lib.arms import Arm
from bench.lib.rounds import rounds_within, slowest, take_turns
from gckernels.sync.lab import sent_nbytes

TURN_S = 0.4  # a turn has as many steps as fit
MAX_STEPS = 20
LONG_S = 0.4  # a step that takes longer needs no other one before it to fill the caches


@dataclass(frozen=True)
class Turns:
    """The turns of one arm, one entry for each round.

    Attributes:
        step_s: seconds per step, on the slowest rank.
        wire_nbytes: bytes per step that the interfaces have sent, as means over the ranks.
        cpu_s: seconds of a core per step, as means over the ranks.
    """

    step_s: tuple[float, ...]
    wire_nbytes: tuple[float, ...]
    cpu_s: tuple[float, ...]

    def __add__(self, other: Turns) -> Turns:
        return Turns(self.step_s + other.step_s, self.wire_nbytes + other.wire_nbytes, self.cpu_s + other.cpu_s)


def turn(arm: Arm, count: int) -> tuple[float, float, float]:
    """Train ``count`` steps; returns seconds, sent bytes and seconds of a core per step, on this rank.

    Several steps have another one before them that fills the caches, whose bytes alone are counted.
    """
    before, untimed = sent_nbytes(), count > 1
    if untimed:
        arm.ticks()
    cpu_s, start_s = time.process_time(), time.perf_counter()
    for _ in range(count):
        arm.ticks()
    end_s, end_cpu_s = time.perf_counter(), time.process_time()
    dist.barrier()  # all bytes have arrived
    nbytes = sent_nbytes() - before
    return (end_s - start_s) / count, nbytes / (count + untimed), (end_cpu_s - cpu_s) / count


def measured(arms: Mapping[str, Arm], budget_s: float, least: int, most: int) -> dict[str, Turns]:
    """The turns of arms that take turns for ``budget_s`` seconds; collective.

    Args:
        arms: the arms by name, ready to be measured.
        budget_s: seconds for all rounds.
        least: the number of rounds at least.
        most: the number of rounds at most.
    """
    short = {name: functools.partial(turn, arm, 1) for name, arm in arms.items()}
    alone_s = {name: float(slowest(each)[0, 0]) for name, each in take_turns(short, 1, 1).items()}
    counts = {name: steps_of_a_turn(each_s) for name, each_s in alone_s.items()}
    round_s = sum((counts[name] + (counts[name] > 1)) * alone_s[name] for name in arms)
    rounds = rounds_within(budget_s, round_s, least, most)
    turns = take_turns({name: functools.partial(turn, arm, counts[name]) for name, arm in arms.items()}, rounds, 0)
    return {name: _over_ranks(each) for name, each in turns.items()}


def steps_of_a_turn(step_s: float) -> int:
    """The number of steps of a turn, given the seconds of one."""
    return 1 if step_s > LONG_S else min(MAX_STEPS, max(2, int(TURN_S / step_s)))


def ratio_of(values: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """The median ratio of the values to the others of the same rounds, and its standard error.

    The error is that of the median of many normal values with these quartiles.
    """
    low, middle, high = statistics.quantiles([a / b for a, b in zip(values, others, strict=True)], n=4)
    return middle, 0.93 * (high - low) / len(values) ** 0.5


def _over_ranks(turns: Sequence[tuple[float, float, float]]) -> Turns:
    means = torch.tensor(turns, dtype=torch.float64)[:, 1:].contiguous()
    dist.all_reduce(means)
    means /= dist.get_world_size()
    return Turns(tuple(slowest(turns)[:, 0].tolist()), tuple(means[:, 0].tolist()), tuple(means[:, 1].tolist()))
