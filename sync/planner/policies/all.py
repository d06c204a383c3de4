"""The policy ``all``: one compressor for everything."""

from __future__ import annotations

from gckernels.compressor import Compressor
from gckernels.ops import Identity

from ...accuracy.accuracy import unfitted
from ...plans.plan import Plan
from ..drafts.drafts import Option, draft_of_launches, plan_of, usual_launches
from ..drafts.problem import Problem, ProblemError
from .none import none


def all_(problem: Problem) -> Plan:
    """The fastest plan that uses one compressor wherever that is allowed; without any compressor that of ``none``."""
    plans = [uniform(problem, compressor) for compressor in problem.compressors if problem.users[compressor]]
    return min(plans, key=problem.step_s) if plans else none(problem)


def uniform(problem: Problem, compressor: Compressor) -> Plan:
    """The plan that uses a compressor wherever it is allowed, each launch in one message by the default program.

    Raises:
        ProblemError: no tensor may use it.
    """
    compressor = unfitted(compressor)
    if compressor != Identity() and not problem.users.get(compressor):
        raise ProblemError(f"policy: no tensor may use {compressor}, so there is nothing to compress")
    program = problem.default_program(compressor)
    return plan_of(problem, draft_of_launches(usual_launches(problem), Option(program, compressor)))
