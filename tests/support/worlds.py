"""Drawn worlds for the rules of choices: what a step takes with each plan, while other programs and links change.

A world has arms with true times, of which arm 0 is plain and takes 1 in a quiet world; log-normal noise of each step;
and disturbances. The measure of a choice is its *regret*: the time of all steps from the first one on, over the time
of the single arm that is best in hindsight. A table of it for all kinds of worlds, in minutes::

    PYTHONPATH=. python tests/support/worlds.py --worlds 300
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

from gckernels.sync.tuning.trials.trials import PLAIN, Trials, Turn
from gckernels.sync.tuning.watching.pace import DOUBTFUL_GAP, WINDOW, Pace

STEPS = 2000
TAIL = 0.05
"""The share of steps that take up to six times as long, in worlds with heavy tails."""


class World:
    """A world of some kind, drawn by a seed.

    Args:
        kind: the kind, one of :data:`KINDS`.
        seed: the seed.
        steps: the number of steps.

    Attributes:
        arms: the number of arms.
    """

    def __init__(self, kind: str, seed: int, steps: int = STEPS) -> None:
        self.random = draw = random.Random(f"{kind} {seed}")
        self.steps, self.tail = steps, 0.0
        self.noise = draw.choice([0.02, 0.05, 0.1])
        self.compute = draw.uniform(0.05, 0.6)  # the part of a plain step
        shares, self.coding = [1.0, 0.5, 0.27, 0.15], [0.0, 0.02, 0.03, 0.04]
        self.slowness, self.link = [1.0] * steps, [1.0] * steps  # factors of computing, and of the link
        if kind == "many arms":
            shares, self.coding = [*shares, 0.6, 0.35], [*self.coding, 0.02, 0.05]
        elif kind == "fast link":
            self.compute = draw.uniform(0.7, 0.95)
            self.coding = [each * draw.uniform(1.0, 4.0) for each in self.coding]
        self.wires = [(1.0 - self.compute) * share for share in shares]
        self.arms = len(shares)
        KINDS[kind](self, draw)

    def mean(self, arm: int, step: int) -> float:
        """The mean seconds of a step. Other programs slow computing and coding, and the stack of the network less."""
        slowness = self.slowness[step]
        wire = self.wires[arm] * self.link[step] * (1.0 + 0.5 * (slowness - 1.0))
        return (self.compute + self.coding[arm]) * slowness + wire

    def draw(self, arm: int, step: int) -> float:
        """The seconds of a step."""
        seconds = self.mean(arm, step) * math.exp(self.random.gauss(0.0, self.noise))
        return seconds * self.random.uniform(1.5, 6.0) if self.random.random() < self.tail else seconds

    @property
    def best_s(self) -> float:
        """The mean seconds of all steps with the arm that is best in hindsight."""
        tails = 1.0 + self.tail * (0.5 * (1.5 + 6.0) - 1.0)
        return tails * min(sum(self.mean(arm, step) for step in range(self.steps)) for arm in range(self.arms))


def _quiet(world: World, draw: random.Random) -> None:
    pass


def _bursts(world: World, draw: random.Random) -> None:
    """Other programs come and go."""
    at = 0
    while at < world.steps:
        at += int(draw.expovariate(1 / 400))
        length, slowness = int(draw.uniform(20, 250)), draw.uniform(1.3, 3.0)
        world.slowness[at : at + length] = [slowness] * len(world.slowness[at : at + length])
        at += length


def _another_link(world: World, draw: random.Random) -> None:
    """The link changes once."""
    at, factor = draw.randrange(400, 1200), draw.choice([0.2, 0.4, 2.5, 5.0])
    world.link[at:] = [factor] * len(world.link[at:])


def _tails(world: World, draw: random.Random) -> None:
    world.tail = TAIL


def _bursts_and_tails(world: World, draw: random.Random) -> None:
    _bursts(world, draw)
    _tails(world, draw)


def _drift(world: World, draw: random.Random) -> None:
    """The link and the machine change slowly."""
    link, slowness = draw.uniform(0.3, 4.0), draw.uniform(0.5, 3.0)
    for step in range(world.steps):
        world.link[step], world.slowness[step] = link ** (step / world.steps), slowness ** (step / world.steps)


def _two_tenants(world: World, draw: random.Random) -> None:
    """One program needs the cores, another one the link, by turns."""
    length, slowness, link = draw.randrange(20, 150), draw.uniform(1.3, 3.0), draw.uniform(1.3, 4.0)
    for step in range(world.steps):
        if step // length % 2:
            world.slowness[step] = slowness
        else:
            world.link[step] = link


def _flapping(world: World, draw: random.Random) -> None:
    """The link has two rates by turns, each for longer than a turn of a trial."""
    length, factor = draw.randrange(30, 200), draw.choice([0.2, 0.4, 2.5, 5.0])
    for step in range(world.steps):
        if step // length % 2:
            world.link[step] = factor


def _slow_rank(world: World, draw: random.Random) -> None:
    """Some rank is slower than before, another one later."""
    at = 0
    while at < world.steps:
        length, slowness = draw.randrange(30, 400), draw.choice([1.0, 1.0, 1.2, 1.5, 2.0])
        world.slowness[at : at + length] = [slowness] * len(world.slowness[at : at + length])
        at += length


def _plain_pays(world: World, draw: random.Random) -> None:
    """The link becomes so fast that nothing pays."""
    at = draw.randrange(300, 1200)
    world.link[at:] = [0.02] * len(world.link[at:])
    world.coding = [0.0, 0.05, 0.06, 0.08]


KINDS: dict[str, Callable[[World, random.Random], None]] = {
    "quiet": _quiet,
    "bursts": _bursts,
    "another link": _another_link,
    "heavy tails": _tails,
    "bursts and tails": _bursts_and_tails,
    "drift": _drift,
    "two tenants": _two_tenants,
    "flapping link": _flapping,
    "slow rank": _slow_rank,
    "plain pays": _plain_pays,
    "many arms": _quiet,
    "fast link": _quiet,
}
"""The disturbances of worlds, by their kind."""


def choice(arms: int) -> tuple[Trials, Generator[Turn, Sequence[float], None]]:
    """The trials of a training, and all turns that its rules ask for: those of the first race, windows of the plan that
    stays, and comparisons."""
    trials = Trials()

    def turns() -> Generator[Turn, Sequence[float], None]:
        yield Turn(PLAIN, 1, 1)  # the first step of a training
        yield from trials.race()
        trials.join([1.0] * (arms - 1))
        yield from trials.race()
        pace = Pace(DOUBTFUL_GAP) if trials.was_disturbed else Pace()
        yield Turn(trials.incumbent, 2, 2)
        while True:
            times = yield Turn(trials.incumbent, WINDOW)
            trials.ran(times)
            pace, occasion = pace.after(statistics.median(times), WINDOW, trials.error(WINDOW))
            if occasion is not None and trials.may_compare:
                before = trials.incumbent
                yield from trials.compare(trials.next_challengers(*occasion.asks), times)
                yield Turn(trials.incumbent, 2, 2)
                pace = pace.compared(occasion, trials.incumbent != before)

    return trials, turns()


@dataclass(frozen=True)
class Played:
    """A training in a world.

    Attributes:
        regret: its time over that of the best arm.
        incumbent: the arm that stays at the end.
    """

    regret: float
    incumbent: int


def play(world: World) -> Played:
    """A training that chooses its plan in a world. Each change of the plan takes a plain step."""
    trials, turns = choice(world.arms)
    turn, running, step, total_s = next(turns), PLAIN, 0, 0.0
    while True:
        times: list[float] = []
        changes = [PLAIN] if turn.arm != running else []
        running = turn.arm
        for arm in (*changes, *[turn.arm] * turn.steps):
            if step == world.steps:
                return Played(total_s / world.best_s, trials.incumbent)
            times.append(world.draw(arm, step))
            total_s += times[-1]
            step += 1
        turn = turns.send(times[len(changes) + turn.uncounted :])


def wrongly_plain(world: World) -> bool:
    """Whether another arm is faster than plain at the end by more than a hook is worth."""
    last = world.steps - 1
    return min(world.mean(arm, last) for arm in range(1, world.arms)) < 0.95 * world.mean(0, last)


@dataclass(frozen=True)
class Regrets:
    """The regrets of trainings in worlds of a kind.

    Attributes:
        median: the median.
        ninety: the value that 90 % are below.
        worst: the largest.
        ended_plain: the trainings that ended with plain steps although another arm was faster.
    """

    median: float
    ninety: float
    worst: float
    ended_plain: int

    @classmethod
    def of(cls, kind: str, worlds: int) -> Regrets:
        """The regrets in the first worlds of a kind."""
        drawn = [World(kind, seed) for seed in range(worlds)]
        played = [play(world) for world in drawn]
        found = sorted(each.regret for each in played)
        plain = sum(each.incumbent == PLAIN and wrongly_plain(world) for world, each in zip(drawn, played, strict=True))
        return cls(found[worlds // 2], found[int(0.9 * worlds)], found[-1], plain)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Print the regret of choices in drawn worlds.")
    parser.add_argument("--worlds", type=int, default=100, help="of each kind")
    count = parser.parse_args().worlds
    for name in KINDS:
        got = Regrets.of(name, count)
        print(f"{name:<17} {got.median:.3f} {got.ninety:.3f} {got.worst:.3f} {got.ended_plain:3d}", flush=True)
