"""The progress of a tuning, as checkpoints have it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..traces.model_trace import ModelTrace
from .trials.race import Tuned
from .trials.rules import Phase
from .watching.pace import Pace

_OTHER_RULE = "it was chosen with another rule of accuracy"


@dataclass(frozen=True)
class Progress:
    """The progress of a tuning.

    Attributes:
        stage: the number of the last stage that has a plan; ``None`` before the first, and while plans are tried.
        policy: the policy that has found its plan.
        tuned: the outcome of its trials; ``None`` without a stage.
        found: errors that made the guard replace a compressor, by parameter and compressor.
        pace: the pace of its running phase.
        why_anew: why tuning begins anew though a job is continued; empty if it does not.
        trace: the trace of saved trials that no longer count; ``None`` if there are none.
        is_given: whether the training had given the plan itself.
    """

    stage: int | None = None
    policy: str = "none"
    tuned: Tuned | None = None
    found: Mapping[tuple[str, str], float] = field(default_factory=dict)
    why_anew: str = ""
    pace: Pace | None = None
    trace: ModelTrace | None = None
    is_given: bool = False

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
            text: the text.
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
            pace = Pace(int(record["gap"]), int(record["since"])) if "gap" in record else None
            return Progress(stage, str(record["policy"]), tuned, found, pace=pace)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"state: tuning is not valid: {error!r}") from error


AGAIN_STEPS = 1000
"""Steps from a failure to the next attempt."""
FORGET = 4
"""An attempt is forgotten after as many times the steps for which the next one had to wait."""


@dataclass(frozen=True)
class Allowance:
    """The steps from one attempt to the next. They double with every one, until one is forgotten.

    Attributes:
        least: the steps after the first attempt.
        wait: the steps after the last attempt.
        since: the steps since the last attempt; ``None`` before the first, which need not wait.
    """

    least: int
    wait: int = 0
    since: int | None = None

    def later(self, steps: int) -> Allowance:
        """The allowance some steps later."""
        return self if self.since is None else replace(self, since=self.since + steps)

    def spent(self) -> Allowance:
        """The allowance after an attempt."""
        forgotten = self.since is None or self.since >= FORGET * self.wait
        return replace(self, wait=self.least if forgotten else 2 * self.wait, since=0)


_NUMBER = re.compile(r"\d[\d.,]*")


@dataclass(frozen=True)
class Retries:
    """The failures so far. All ranks have the same.

    Attributes:
        allowance: the steps from one failure to the next attempt. They double, as those between two plans do.
        at_step: the step of the last failure.
        due: the step of the next attempt; ``None`` if nothing has failed since the last plan was found.
        causes: the texts of all failures without their numbers.
    """

    allowance: Allowance = field(default_factory=lambda: Allowance(AGAIN_STEPS))
    at_step: int = 0
    due: int | None = None
    causes: frozenset[str] = frozenset()

    def after(self, step: int, text: str) -> Retries:
        """The failures with one more, the error ``text`` at a step."""
        allowance = self.allowance.later(step - self.at_step).spent()
        return Retries(allowance, step, step + allowance.wait, self.causes | {_cause(text)})

    def is_known(self, text: str) -> bool:
        """Whether something has failed with the same error before, but for numbers such as times in it."""
        return _cause(text) in self.causes

    def settled(self) -> Retries:
        """The failures when a plan has been found: nothing is tried again."""
        return replace(self, due=None)


def _cause(text: str) -> str:
    return _NUMBER.sub("", text)
