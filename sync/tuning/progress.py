"""The progress of a tuning, as checkpoints have it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ..planner.trace_files import trace_from_text, trace_to_text
from .rules import Stage
from .running import Tuned


@dataclass(frozen=True)
class Progress:
    """The progress of a tuning.

    Attributes:
        steps: the number of synchronised steps so far.
        stage: the number of the last stage that has a plan; ``None`` before the first, and while plans are tried.
        rule: the name of that stage.
        policy: the policy that has found its plan.
        tuned: the outcome of its trials; ``None`` without a stage.
    """

    steps: int
    stage: int | None = None
    rule: str = ""
    policy: str = "none"
    tuned: Tuned | None = None

    def to_text(self) -> str:
        """The progress as JSON."""
        record: dict[str, object] = {"steps": self.steps}
        if self.tuned is not None:
            record |= {"stage": self.stage, "rule": self.rule, "policy": self.policy}
            record |= {"step_s": self.tuned.step_s, "none_s": self.tuned.none_s}
            record |= {"trace": trace_to_text(self.tuned.trace)}
        return json.dumps(record)

    @staticmethod
    def from_text(text: object, stages: Sequence[Stage]) -> Progress:
        """The progress that :meth:`to_text` has written, if it is one of the same stages; otherwise its steps alone.

        Raises:
            ValueError: it is damaged.
        """
        try:
            record = json.loads(str(text))
            steps, stage = int(record["steps"]), record.get("stage")
            if type(stage) is not int or not 0 <= stage < len(stages) or stages[stage].name != record["rule"]:
                return Progress(steps)
            trace = trace_from_text(record["trace"], "state")
            tuned = Tuned(trace, stages[stage].accuracy, float(record["step_s"]), float(record["none_s"]))
            return Progress(steps, stage, stages[stage].name, str(record["policy"]), tuned)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"state: tuning is not valid: {error!r}") from error
