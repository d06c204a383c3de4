"""A gain counts if it is larger than the error of what is predicted of a step."""

from __future__ import annotations

import pytest

from gckernels.sync.plans.plan import Frontend
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import TracedTensor
from planning import problem_of

TRACE = ModelTrace("m", (TracedTensor("w", 1, 0.4),), backward_s=0.4, forward_s=0.3, optimizer_s=0.1)


@pytest.mark.parametrize(
    ("none_s", "margin", "least_s"),
    [
        (1.8, 0.1, 0.1),  # one second on top of the computing
        (1.8, 0.25, 0.25),
        (1.0, 0.1, 0.02),  # 0.2 s
        (0.8, 0.1, 0.016),  # nothing waits, and a fifth of the step counts
        (0.7, 0.1, 0.014),  # shorter than what was recorded
        (1.8, 0.0, 0.0),
    ],
)
def test_the_error_is_that_of_what_is_predicted(none_s, margin, least_s):
    problem = problem_of(TRACE, Frontend.MODULE, margin=margin)
    assert problem.is_gain(none_s - 1.001 * least_s - 1e-9, none_s)
    assert not problem.is_gain(none_s - 0.999 * least_s, none_s)


def test_a_slower_plan_is_no_gain():
    problem = problem_of(TRACE, Frontend.MODULE)
    assert not problem.is_gain(1.001, 1.0) and not problem.is_gain(1.0, 1.0)
