"""When a predicted gain is more than the error of the prediction."""

from __future__ import annotations

from ...traces.model_trace import ModelTrace

PREDICTED_SHARE = 0.2
"""The share of a step that counts as predicted at least: what runs beside a backward makes it longer, by a predicted
time, even where nothing waits for communication."""


def is_gain(step_s: float, none_s: float, trace: ModelTrace, margin: float) -> bool:
    """Whether a plan saves more than predictions may be wrong by.

    The trace has measured forward, backward and the optimizer, which all plans have in common. Only what a step takes
    on top of them is predicted, from prices with an error.

    Args:
        step_s: the predicted seconds of a step with the plan.
        none_s: the predicted seconds of a step that compresses nothing.
        trace: the trace that both predictions are made for.
        margin: the relative error of prices, as :attr:`~gckernels.sync.planner.machines.machine.Machine.margin`.
    """
    return none_s - step_s > margin * max(none_s - trace.computing_s, none_s * PREDICTED_SHARE)
