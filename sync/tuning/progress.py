"""The progress of a tuning, as checkpoints have it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..planner.trace_files import trace_from_text, trace_to_text
from .drift import Allowance
from .rules import Stage
from .running import Tuned


@dataclass(frozen=True)
class Progress:
    """The progress of a tuning.

    Attributes:
        stage: the number of the last stage that has a plan; ``None`` before the first, and while plans are tried.
        policy: the policy that has found its plan.
        tuned: the outcome of its trials; ``None`` without a stage.
        found: errors of compressors in training because of which they were left, by parameter and compressor.
        waits: the steps from one action of its running phase to the next.
        why_anew: why tuning begins anew though a job is continued; empty if it does not.
    """

    stage: int | None = None
    policy: str = "none"
    tuned: Tuned | None = None
    found: Mapping[tuple[str, str], float] = field(default_factory=dict)
    why_anew: str = ""
    waits: tuple[Allowance, ...] = ()

    def to_text(self, stages: Sequence[Stage], ranks: int) -> str:
        """The progress as JSON.

        Args:
            stages: the rules of the tuning.
            ranks: the number of ranks.
        """
        record: dict[str, object] = {"ranks": ranks, "found": [[*key, error] for key, error in self.found.items()]}
        if self.tuned is not None and self.stage is not None:
            record |= {"stage": self.stage, "rule": _allowed(stages[self.stage]), "policy": self.policy}
            record |= {"step_s": self.tuned.step_s, "none_s": self.tuned.none_s}
            record |= {"trace": trace_to_text(self.tuned.trace)}
            record |= {"waits": [[each.least, each.wait, each.since] for each in self.waits]}
        return json.dumps(record)

    @staticmethod
    def from_text(text: str, stages: Sequence[Stage], ranks: int) -> Progress:
        """The progress that :meth:`to_text` has written, without the outcome of trials that no longer count.

        Args:
            text: the text.
            stages: the rules of this tuning.
            ranks: the number of ranks now.

        Raises:
            ValueError: it is damaged.
        """
        try:
            record = json.loads(text)
            found = {(str(name), str(spec)): float(error) for name, spec, error in record["found"]}
            if record["ranks"] != ranks:
                return Progress(found=found, why_anew=f"it was found on {int(record['ranks'])} ranks")
            if (stage := record.get("stage")) is None:
                return Progress(found=found, why_anew="its trials had not ended")
            if stage not in range(len(stages)) or record["rule"] != _allowed(stages[stage]):
                return Progress(found=found, why_anew="it was found with another rule of accuracy")
            trace = trace_from_text(record["trace"], "state")
            tuned = Tuned(trace, stages[stage].accuracy, float(record["step_s"]), float(record["none_s"]))
            waits = tuple(_allowance(*each) for each in record.get("waits", ()))
            return Progress(stage, str(record["policy"]), tuned, found, waits=waits)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"state: tuning is not valid: {error!r}") from error


def _allowance(least: int, wait: int, since: int | None) -> Allowance:
    return Allowance(int(least), int(wait), None if since is None else int(since))


def _allowed(stage: Stage) -> str:
    """The name of a rule and the errors or compressors that it allows, by which rules are compared."""
    rule = stage.accuracy
    allowed = (rule.limit, rule.low_rank_limit) if rule.named is None else rule.named
    return f"{stage.name}: {', '.join(map(str, allowed))}"
