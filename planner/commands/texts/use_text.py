"""How a training uses the file of a plan, as text for people."""

from __future__ import annotations

from ...drafts.problem import Problem


def use_of(path: str, problem: Problem) -> str:
    """Sentences that say how to use a plan for a problem.

    Args:
        path: the file of the plan.
    """
    plan = f"sync.Plan.load({path!r})"
    if problem.rounds is not None:
        rounds = f"every={problem.rounds.every}, delay={problem.rounds.delay}"
        return f"sync.attach(model, sync.Updates(optimizer, {plan}, {rounds})) uses the plan; model is a bare module"
    uses = f"sync.attach(model, {plan}) uses the plan"
    if problem.frontend.traits.is_wrapped:
        return f"{uses}; model is {problem.frontend.traits.attached}"
    remedy = "gckernels trace SCRIPT -o FILE records a trace of one, for another plan"
    if problem.trace.buckets:
        remedy = "--frontend ddp makes one for it"
    return f"{uses}; model is a bare module, and no DistributedDataParallel model can take this plan: {remedy}"
