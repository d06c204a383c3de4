"""The critical chain of a predicted step: what it waits for, one thing after the other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from .timeline.timeline import TimedStage, Timeline
from .timeline.virtual_lanes import Run


@dataclass(frozen=True)
class Link:
    """A part of the critical chain.

    Attributes:
        name: ``"forward"``, ``"backward"`` or ``"optimizer"``; the name of a lane; or ``"another rank"``.
        stage: the stage, if it is on a lane.
        start_s: when it begins, in seconds from the start of the step.
        end_s: when it ends.
        slowed_s: the seconds that it takes longer than alone, because it shares resources.
    """

    name: str
    stage: TimedStage | None
    start_s: float
    end_s: float
    slowed_s: float


def critical_chain(timeline: Timeline) -> tuple[Link, ...]:
    """The chain of everything that ends just when the next part of it begins, from the start of a step to its end.

    The step gets shorter only if something in the chain does, or what slows it down.
    """
    stages = {each.task: stage for each, stage in zip(timeline.submitted, timeline.stages, strict=True)}
    submitter = set(timeline.run.submitter)
    ends_s = (timeline.forward_s, timeline.forward_s + timeline.backward_s)
    links: list[Link] = []
    for task in _chain(timeline.run):
        start_s, end_s = timeline.run.times.start_s[task], timeline.run.times.end_s[task]
        if start_s == end_s:
            continue
        need, stage = timeline.run.tasks[task].need, stages.get(task)
        slowed_s = max(end_s - timeline.run.times.load_s[task] - need.loaded_s, 0.0)
        if stage is not None:
            name = stage.lane.name
        elif task in submitter:
            middle_s = (start_s + end_s) / 2  # sums of times are rounded
            name = "forward" if middle_s < ends_s[0] else "backward" if middle_s < ends_s[1] else "optimizer"
        else:
            name = "another rank"
        links.append(Link(name, stage, start_s, end_s, slowed_s))
    return tuple(reversed(links))


def _chain(run: Run) -> Iterator[int]:
    """The tasks of the chain from the last to the first. Each begins at exactly the time at which another one ends."""
    times, lanes = run.times, defaultdict[int, list[int]](list)
    places = []
    for number, each in enumerate(run.tasks):
        places.append(len(lanes[each.lane]))
        lanes[each.lane].append(number)
    task: int | None = max(range(len(run.tasks)), key=lambda number: times.end_s[number])
    while task is not None:
        yield task
        lane, _, after = run.tasks[task]
        candidates = (*after, *reversed(lanes[lane][: places[task]]))
        start_s = times.start_s[task]
        task = next((number for number in candidates if times.end_s[number] == start_s), None)
