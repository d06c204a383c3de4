"""The progress of a tuning, as checkpoints have it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..traces.model_trace import ModelTrace
from .trials.rules import Phase
from .trials.tuned import Tuned

if TYPE_CHECKING:
    from .watching.pace import Pace

_OTHER_RULE = "it was chosen with another rule of accuracy"


@dataclass(frozen=True)
class Progress:
    """The progress of a tuning."""

    stage: int | None = None
    """The number of the last stage that has a plan; ``None`` before the first, and while plans are tried."""
    policy: str = "none"  # the policy that has found its plan
    tuned: Tuned | None = None  # the outcome of its trials; None without a stage
    found: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """Errors that made the guard replace a compressor, by parameter and compressor."""
    why_anew: str = ""  # why tuning begins anew though a job is continued; empty if it does not
    pace: Pace | None = None  # the pace at which the plan that runs is compared with others
    trace: ModelTrace | None = None  # the trace of saved trials that no longer count; None if there are none
    is_given: bool = False  # whether the training had given the plan itself

    def remembered(self, model: ModelTrace) -> ModelTrace:
        """A trace with the errors of compressors that are known from the training.

        Args:
            model: the trace to which they are added if no trials have made one.
        """
        trace = self.trace if self.tuned is None else self.tuned.trace
        return (trace or model).remembering(self.found)

    def to_text(self, stages: Sequence[Phase], ranks: int) -> str:
        """The progress of a tuning by the rules ``stages`` on ``ranks`` ranks, as JSON."""
        if self.is_given:
            return json.dumps({"given": [stage.allowed for stage in stages]})
        record: dict[str, object] = {"ranks": ranks, "found": [[*key, error] for key, error in self.found.items()]}
        if self.tuned is not None and self.stage is not None:
            record |= {"stage": stages[self.stage].allowed, "policy": self.policy}
            record |= {"step_s": self.tuned.step_s, "none_s": self.tuned.none_s}
            record |= {"trace": self.tuned.trace.to_text()}
            record |= {} if self.pace is None else {"gap": self.pace.gap, "since": self.pace.since}
        return json.dumps(record)

    @staticmethod
    def from_text(text: str, stages: Sequence[Phase], ranks: int, step: int) -> Progress:
        """The progress that :meth:`to_text` has written, without the outcome of trials that no longer count.

        Args:
            stages: the rules of this tuning.
            ranks: the number of ranks now.
            step: the step at which the job continues.

        Raises:
            ValueError: it is damaged.
        """
        try:
            record = json.loads(text)
            if "given" in record:
                is_same = record["given"] == [stage.allowed for stage in stages]
                return Progress(is_given=True, why_anew="" if is_same else _OTHER_RULE)
            found = {(str(name), str(spec)): float(error) for name, spec, error in record["found"]}
            if (rule := record.get("stage")) is None:
                return Progress(found=found, why_anew="its trials had not ended")
            trace = ModelTrace.from_text(record["trace"], "state")
            if record["ranks"] != ranks:
                return Progress(found=found, why_anew=f"it was found on {int(record['ranks'])} ranks", trace=trace)
            begun = [number for number, stage in enumerate(stages) if stage.first_step <= step]
            stage = next((number for number in begun if stages[number].allowed == rule), None)
            if stage is None:
                return Progress(found=found, why_anew=_OTHER_RULE, trace=trace)
            times_s = (float(record[name]) for name in ("step_s", "none_s"))
            tuned = Tuned(trace, stages[stage].accuracy, *times_s)
            pace = None
            if "gap" in record:
                from .watching.pace import Pace

                pace = Pace(int(record["gap"]), int(record["since"]))
            return Progress(stage, str(record["policy"]), tuned, found, pace=pace)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"state: tuning is not valid: {error!r}") from error
