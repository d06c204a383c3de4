"""A call in a train takes what the link needs for it, however calls that are on their way at once share the link."""

from __future__ import annotations

import pytest
import torch

from gckernels.planner.profiling.measurements import collectives
from gckernels.sync.resources.stage import Issue, Wait

CALL_S = 1.0


class FairLink:
    """A link of which calls on their way have equal parts, and the watch that shows its time.

    Args:
        head_start_s: seconds for which the first call has the link for itself.
    """

    def __init__(self, head_start_s: float) -> None:
        self._head_start_s, self._now_s = head_start_s, 0.0
        self._begin_s: dict[int, float] = {}
        self._left_s: dict[int, float] = {}
        self._marks: list[float] = []

    def issue(self) -> Wait:
        call = len(self._begin_s)
        self._begin_s[call], self._left_s[call] = max(self._now_s, self._head_start_s if call else 0.0), CALL_S
        return lambda: self._run_until_end(call)

    def _run_until_end(self, call: int) -> None:
        while call in self._left_s:
            sending = [each for each in self._left_s if self._begin_s[each] <= self._now_s]
            next_s = [self._begin_s[each] - self._now_s for each in self._left_s if each not in sending]
            passed_s = min(next_s + [self._left_s[each] * len(sending) for each in sending])
            self._now_s += passed_s
            for each in sending:
                self._left_s[each] -= passed_s / len(sending)
                if self._left_s[each] <= 1e-12:
                    del self._left_s[each]

    def mark(self) -> None:
        self._marks.append(self._now_s)

    def seconds(self) -> list[float]:
        return self._marks

    def cores_s(self) -> float:
        return 0.0


@pytest.mark.parametrize("head_start_s", [0.0, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("length", [collectives.LONG_TRAIN, collectives.TRAIN])
def test_a_call_takes_the_time_of_its_bytes(monkeypatch: pytest.MonkeyPatch, head_start_s: float, length: int) -> None:
    link = FairLink(head_start_s)
    monkeypatch.setattr(collectives, "Stopwatch", lambda device: link)
    calls: list[Issue] = [link.issue]
    call_s, _, _ = collectives.train(calls, torch.device("cpu"), length)
    assert call_s == pytest.approx(CALL_S, rel=1e-6)
