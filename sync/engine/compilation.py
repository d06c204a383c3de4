"""Compilation of the host code of a plan before the first step, so that backward never waits for a compiler."""

from __future__ import annotations

from gckernels.compressor import Compressor

from ..plans.plan import Plan
from ..programs.stages import may_recode
from ..programs.steps import Coding, Place
from ..resources.memory_spaces import Places


def compile_host(plan: Plan, places: Places, rank: int) -> None:
    """Compile, or load from the cache, the code of all methods that the plan runs on the host.

    Args:
        plan: a valid plan.
        places: the memories of this rank.
        rank: rank of this process. Every rank begins with another method, so that ranks of one machine compile
            different ones at the same time, and later find those of the others in the cache.
    """
    wanted = list(host_methods(plan, places).items())
    first = rank % len(wanted) if wanted else 0
    for method, recodes in wanted[first:] + wanted[:first]:
        method.compile_host(recodes)


def host_methods(plan: Plan, places: Places) -> dict[Compressor, bool]:
    """The methods that compute on the host at any time of the training, each with whether it recodes there."""
    wanted: dict[Compressor, bool] = {}
    for unit in plan.units:
        codings = [step for step in unit.program if isinstance(step, Coding)]
        if places.apart:
            codings = [step for step in codings if step.place == Place.HOST]
        if codings:
            recodes = any(may_recode(unit.program, index) for index in range(len(unit.program)))
            for _, method in unit.compressor.schedule:
                for each in (method, method.shard_compressor):
                    wanted[each] = recodes or wanted.get(each, False)
    return wanted
