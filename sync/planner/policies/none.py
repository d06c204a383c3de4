"""The policy ``none``: no compression."""

from __future__ import annotations

from ...plans.plan import Plan
from ..drafts.drafts import Option, draft_of_launches, plan_of, usual_launches
from ..drafts.problem import Problem


def none(problem: Problem) -> Plan:
    """The plan that averages every gradient in place."""
    return plan_of(problem, draft_of_launches(usual_launches(problem), Option()))
