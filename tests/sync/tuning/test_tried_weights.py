"""Encoded parameters among the trials of a model of FSDP2: only where the training allows them, and if they win."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from gckernels import BlockQuant, sync
from gckernels.sync.tuning.trials import spans
from ranks import run_ranks, values_of
from sharded_models import SETTINGS, adamw, digest, model_of, train
from tunings import ScriptedClock

EIGHT, STEPS = "BlockQuant", 130
FASTEST = {"weights": 0.3, "gradients": 0.4, "plain": 1.0}
"""The seconds of steps with encoded parameters, with exact ones and compressed gradients, and plain ones."""


class PlanClock(ScriptedClock):
    """A clock that a step moves on by the seconds of its kind of plan."""

    def mark(self) -> float:
        plan = None if (handle := self.handle()) is None else handle.plan
        kind = "plain" if plan is None or not plan.compresses else "weights" if plan.weights else "gradients"
        self.now_s += self.step_s[kind]
        return self.now_s


def tuned(
    weights: str | None, step_s: dict[str, float], steps: int = STEPS
) -> tuple[Any, set[str], str, dict[str, Any]]:
    """The weights of the plan that was found, those of all plans that ran, a digest, and the state."""
    model, handles, seen = model_of(SETTINGS["plain"], "fsdp"), list[Any](), set[str]()
    clock = PlanClock(lambda: handles[0] if handles else None, step_s)
    with mock.patch.object(spans, "clock_of", lambda device: clock):
        attachment = sync.attach(model, weights=weights)
        handles.append(attachment)
        attachment.on_step_end(lambda: seen.add(str(attachment.plan.weights)))
        train(model, SETTINGS["plain"], range(steps), adamw(model))
    found = attachment.plan.weights, seen, digest(model), attachment.state_dict()
    assert ("parameters by BlockQuant" in repr(attachment)) == (attachment.plan.weights is not None)
    attachment.close()
    return found


def resumed(weights: str | None, state: dict[str, Any]) -> tuple[Any, list[str]]:
    """The weights of the plan with which a training goes on, and its decisions."""
    model = model_of(SETTINGS["plain"], "fsdp")
    attachment = sync.attach(model, weights=weights)
    attachment.load_state_dict(state)
    train(model, SETTINGS["plain"], range(2), adamw(model))
    found = attachment.plan.weights, [each.text for each in attachment.decisions]
    attachment.close()
    return found


def tuned_and_resumed() -> list[Any]:
    found = tuned(EIGHT, FASTEST)
    return [found, resumed(EIGHT, found[-1]), resumed(None, found[-1])]


@pytest.mark.host_only("FSDP gathers exact parameters on a device itself")
def test_encoded_parameters_are_tried_where_they_are_allowed_and_stay_if_they_win():
    ranks = values_of(run_ranks(2, tuned_and_resumed, timeout_s=300.0))
    for wins, again, refused in ranks:
        assert wins[0] == BlockQuant() and wins[1] == {"None", str(BlockQuant())}
        assert again[0] == BlockQuant()
        assert refused[0] is None
        assert any("does not allow parameters by BlockQuant" in text for text in refused[1])
    first, second = ranks
    assert [each[0] for each in first] == [each[0] for each in second]


@pytest.mark.slow
@pytest.mark.parametrize("step_s", [dict.fromkeys(FASTEST, 1.0), FASTEST | {"weights": 0.5}], ids=["equal", "slower"])
def test_encoded_parameters_do_not_stay_where_nothing_pays(step_s):
    for found, seen, *_ in values_of(run_ranks(2, tuned, EIGHT, step_s)):
        assert found is None and seen == {"None", str(BlockQuant())}


@pytest.mark.slow
def test_encoded_parameters_are_not_tried_where_they_are_not_allowed():
    for found, seen, *_ in values_of(run_ranks(2, tuned, None, FASTEST, 70)):
        assert found is None and seen == {"None"}
