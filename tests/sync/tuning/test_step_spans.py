"""Spans of steps: trials judge the forward and backward of a step, whatever a training does between two of them."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from gckernels.sync.tuning.trials.spans import StepSpans, bounds_of, of_all_ranks
from models import build
from ranks import run_ranks, values_of
from tunings import tuned_handle

CPU = torch.device("cpu")


def group() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def alone() -> tuple[list[float], int]:
    """The seconds of some spans, and the hooks that are left at the model."""
    model = torch.nn.Linear(4, 4)
    spans, found = StepSpans(model, group(), CPU), []
    spans.meet()
    spans.end_step()  # its beginning is not known
    found += spans.taken()
    model(torch.ones(1, 4))
    time.sleep(0.05)
    model(torch.ones(1, 4))  # the last forward that can have a backward
    with torch.no_grad():
        model(torch.ones(1, 4))
    spans.end_step()
    time.sleep(0.05)
    spans.end_step()  # the model was not called: it begins where the one before has ended
    time.sleep(0.05)
    spans.end_step(counts=False)
    found += spans.taken()
    assert spans.taken(but=1) == found[:1] and spans.taken(but=2) == found
    spans.close()
    spans.close()
    return [end - begin for begin, end in found], len(model._forward_pre_hooks)


def test_a_span_begins_with_the_last_forward_that_can_have_a_backward():
    (((first_s, second_s), hooks),) = values_of(run_ranks(1, alone))
    assert first_s < 0.05 <= second_s < 0.09 and hooks == 0


def without_its_model() -> None:
    model = torch.nn.Linear(4, 4)
    spans = StepSpans(model, group(), CPU)
    spans.close()
    del model
    spans.open()
    spans.close()


def test_spans_do_not_keep_their_model():
    values_of(run_ranks(1, without_its_model))


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([(0.0, 3.0), (1.0, 3.0)], 2.0),  # the first rank waits for the second one
        ([(0.0, 2.5), (0.0, 3.0)], 3.0),  # it has its gradients earlier
        ([(0.0, 1.0), (5.0, 6.0)], 1.0),  # clocks that are five seconds apart
        ([(0.0, 1.0), (5.0, 6.5)], 1.5),
    ],
)
def test_a_step_lasts_from_the_last_begin_to_the_last_end(spans, seconds):
    maxima = [max(each) for each in zip(*(bounds_of([span]) for span in spans), strict=True)]
    assert of_all_ranks(maxima) == [seconds]


def busy_between(front: str) -> tuple[float, float]:
    """The measured and the plain step of a decision. Before every other step rank 0 is late, as with an evaluation that
    the other rank does not have."""
    module = build("Mlp")
    model, handle = tuned_handle(front, module)
    for step in range(220):
        if handle.decisions:
            break
        module.zero_grad()
        if step % 2:
            with torch.no_grad():
                module(module.batch(step, dist.get_rank()))
            time.sleep(0.1 * (1 - dist.get_rank()))
        model(module.batch(step, dist.get_rank())).backward()
    decision = handle.decisions[-1]
    handle.close()
    return decision.measured_s, decision.none_s


@pytest.mark.parametrize("front", [pytest.param("ddp", marks=pytest.mark.slow), "module"])
def test_trials_do_not_count_the_time_between_steps(front):
    for measured_s, none_s in values_of(run_ranks(2, busy_between, front)):
        assert max(measured_s, none_s) < 0.05
