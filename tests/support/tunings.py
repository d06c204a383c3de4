"""Tuned trainings for tests: plans that need no profile, and steps whose times are what a test says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gckernels import sync
from gckernels.planner.predictive import searching
from gckernels.planner.predictive.planning import Proposal
from gckernels.sync.plans.prediction import Prediction, Source
from gckernels.sync.tuning import uniform_candidates
from gckernels.sync.tuning.trials import spans
from gckernels.sync.tuning.trials.race import Race
from models import SMALL_BUCKETS

PLAIN = "none"


def predicted(plan: sync.Plan, policy: str) -> sync.Plan:
    """The plan with a prediction under a name, by which a test recognises it."""
    source = Source("test", "0")
    return replace(plan, prediction=Prediction(0.5, 1.0, policy, False, 0.02, source, source, 0.1))


def proposal_of(model: Any, specs: Mapping[str, str], world_size: int | None = None) -> tuple[sync.Plan, ...]:
    """Plans with one compressor each, by their names."""
    made = {name: sync.uniform_plan(model, spec, exempt=None, world_size=world_size) for name, spec in specs.items()}
    return tuple(predicted(plan, name) for name, plan in made.items())


def played(found: Race, step_s: Sequence[float]) -> Race:
    """A race whose plans have taken these seconds in all turns that it asks for."""
    rules = found.trials.race()
    with contextlib.suppress(StopIteration):
        turn = next(rules) if step_s else None
        while turn is not None:
            turn = rules.send([step_s[turn.arm]] * (turn.steps - turn.uncounted))
    return found


def policy_of(handle: Any) -> str:
    """The name of the plan that runs."""
    prediction = handle.plan.prediction
    return PLAIN if prediction is None else prediction.policy


@dataclass
class ScriptedClock:
    """A clock that a step with a plan moves on by the seconds that a test says."""

    handle: Callable[[], Any]
    step_s: Mapping[str, float]
    now_s: float = 0.0

    def mark(self) -> float:
        handle = self.handle()  # none while it is attached
        self.now_s += self.step_s[PLAIN if handle is None else policy_of(handle)]
        return self.now_s

    def seconds(self, first: float, second: float) -> float:
        return second - first


@contextlib.contextmanager
def scripted(
    model: torch.nn.Module,
    specs: Mapping[str, str],
    step_s: Mapping[str, float],
    handles: list[Any],
    proposal: Callable[..., Proposal] | None = None,
) -> Iterator[None]:
    """A context in which tuning tries the plans of ``specs``, and reads scripted times.

    Args:
        model: the model that is tuned.
        specs: compressors by the names of their plans.
        step_s: seconds of a step with each plan, and of a plain one.
        handles: a list to which the test adds the handle.
        proposal: what is predicted after their trials, for trainings with ``propose=planner.proposer``.
    """
    clock = ScriptedClock(lambda: handles[0] if handles else None, step_s)
    with (
        mock.patch.object(uniform_candidates, "candidates", lambda *_: proposal_of(model, specs)),
        mock.patch.object(searching, "proposal", proposal),
        mock.patch.object(spans, "clock_of", lambda device: clock),
    ):
        yield


def tuned_handle(
    front: str, module: torch.nn.Module, start_step: int = 0, **options: Any
) -> tuple[torch.nn.Module, Any]:
    """The model to train and its attachment, without a plan."""
    model = module if front == "module" else DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    return model, sync.attach(model, sync.Auto(**options), start_step=start_step)


def train(model: torch.nn.Module, module: torch.nn.Module, steps: range, each: Callable[[int], Any]) -> list[Any]:
    """Train, and return what ``each`` returns after every step."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    seen = []
    for step in steps:
        optimizer.zero_grad()
        model(module.batch(step, dist.get_rank())).backward()
        optimizer.step()
        seen.append(each(step))
    return seen
