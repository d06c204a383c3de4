"""Sentences of decisions: one line for the log that says what was measured, predicted and chosen; short ones for pages,
which begin with a capital and end with a period."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gckernels.planner.predictive.planning import tries
from gckernels.sync.plans.numbers import change
from gckernels.sync.tuning.trials.rules import stages_of
from gckernels.sync.tuning.trials.sentences import failed, restarted, resumed
from gckernels.sync.tuning.trials.trial_report import PlainSteps, Tried, compresses, stays_plain
from gckernels.sync.tuning.watching.pace import Occasion
from gckernels.sync.tuning.watching.watch_report import reason, refined

RECORDED = PlainSteps(buckets=7, nbytes=29.4e6, plain_s=0.266, bare_s=0.058)
FOUR_BITS = Tried("14 BlockQuant(bits=4) by allgather, 3 exact", "auto", 0.096, 0.101, 0.13, 5.2948e6)
HALVES = Tried("17 Cast16 by encoded_allreduce", "all:Cast16", 0.150, 0.148, 0.002)
(SAFE,), (_, COARSE), (EXACT,) = stages_of("safe"), stages_of("aggressive", 10_000), stages_of("exact")
(LISTED,) = stages_of(["BlockQuant"])


def test_a_plan_that_compresses():
    assert compresses(RECORDED, FOUR_BITS, [HALVES], SAFE).log == (
        "7 buckets, 29.4 MB; plain 266 ms; chosen: 14 BlockQuant(bits=4) by allgather, 3 exact (auto): predicted "
        "96.0 ms, measured 101 ms (-62 %), 5.29 MB sent; error 0.13 of 0.2 allowed; also tried: 17 Cast16 by "
        "encoded_allreduce (all) 148 ms; why not more: 43.0 ms of a step still wait for communication; plans with a "
        'larger error need accuracy="aggressive"'
    )


@pytest.mark.parametrize(
    ("bare_s", "rule", "next_rule", "why"),
    [
        (0.099, SAFE, None, "hardly anything of a step waits for communication"),
        (0.058, SAFE, COARSE, "43.0 ms of a step still wait for communication; the rule aggressive follows later"),
        (None, SAFE, None, 'plans with a larger error need accuracy="aggressive"'),
        (None, COARSE, None, "no faster plan that the rule aggressive allows was found"),
    ],
)
def test_why_a_plan_does_not_gain_more(bare_s, rule, next_rule, why):
    recorded = replace(RECORDED, bare_s=bare_s)
    assert compresses(recorded, FOUR_BITS, [], rule, next_rule).log.endswith(f"allowed; why not more: {why}")


def test_a_plan_without_a_prediction():
    text = compresses(RECORDED, replace(FOUR_BITS, predicted_s=None, error=None), [], SAFE).log
    assert "3 exact (auto): measured 101 ms (-62 %), 5.29 MB sent; error not known; why" in text


def test_plain_averaging_that_goes_on():
    fast = replace(RECORDED, plain_s=0.06)
    assert stays_plain(fast, [replace(FOUR_BITS, predicted_s=0.059, measured_s=0.0612)], SAFE).log == (
        "7 buckets, 29.4 MB; plain 60.0 ms; nothing is compressed: the best of 1 plan tried is 14 BlockQuant(bits=4) "
        "by allgather, 3 exact (auto): predicted 59.0 ms, measured 61.2 ms (+2.0 %); only 2.00 ms of a step wait for "
        "communication; plain averaging goes on, without a hook"
    )
    saves = stays_plain(fast, [replace(FOUR_BITS, predicted_s=None, measured_s=0.0588)], SAFE)
    assert "measured 58.8 ms (-2.0 %); a plan must save more than 2 %, and more than noise; only 2.00 ms" in saves.log
    assert "(-2.0 %). A plan must save more than 2 %, and more than noise. Only 2.00 ms" in saves.page
    assert stays_plain(RECORDED, [], EXACT).log == (
        "7 buckets, 29.4 MB; plain 266 ms; nothing is compressed: the rule exact allows no compressor here; "
        "plain averaging goes on, without a hook"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (resumed(1200, "17 Cast16").log, "resumed at step 1,200 with the saved plan: 17 Cast16; no trials"),
        (
            tries([("17 Cast16", 0.148), ("3 exact", None)], 0.43),
            "2 plans predicted to be faster, found in 0.430 s, to be tried: 17 Cast16, predicted 148 ms; 3 exact",
        ),
        (compresses(RECORDED, FOUR_BITS, [], LISTED).log, "error 0.13 allowed by the list; why not more"),
        (
            refined(["a"], "EFSignSGD", "BlockQuant", "its error is 0.95").log,
            "a: its error is 0.95; BlockQuant instead",
        ),
        (refined(list("abcde"), "EFSignSGD", "BlockQuant", "why").log, "a, b, c and 2 others: why"),
        (failed("planning", "no price\n  for a").log, "planning failed: no price for a; training goes on with plain"),
    ],
)
def test_sentences_for_the_log_are_single_lines(text, expected):
    assert expected in text and "\n" not in text


@pytest.mark.parametrize(
    ("sentences", "expected"),
    [
        (
            compresses(RECORDED, FOUR_BITS, [FOUR_BITS], SAFE, COARSE),
            "The fastest of 2 plans: 14 BlockQuant(bits=4) by allgather, 3 exact. 43.0 ms of a step still wait for "
            "communication; the rule aggressive follows later.",
        ),
        (
            compresses(replace(RECORDED, bare_s=0.1), FOUR_BITS, [], SAFE),
            "The plan that was found: 14 BlockQuant(bits=4) by allgather, 3 exact. Hardly anything of a step waits for "
            "communication.",
        ),
        (
            stays_plain(replace(RECORDED, plain_s=0.06), [replace(FOUR_BITS, measured_s=0.0612)], SAFE),
            "Nothing is compressed: the best of 1 plan tried took 61.2 ms (+2.0 %). Only 2.00 ms of a step wait for "
            "communication.",
        ),
        (
            stays_plain(RECORDED, [], SAFE),
            "Nothing is compressed: the rule safe allows no compressor here.",
        ),
        (resumed(1200, "17 Cast16"), "The saved plan goes on, without trials."),
        (restarted("17 Cast16", "its trials had not ended"), "The saved plan is tuned anew: its trials had not ended."),
        (
            refined(list("abcde"), "EFSignSGD", "BlockQuant", "the error is 0.95"),
            "BlockQuant follows EFSignSGD for a, b, c and 2 others: the error is 0.95.",
        ),
        (
            failed("tuning", "no price\n  for a.", "plain DDP", 1000),
            "Tuning failed: no price for a. Training goes on with plain DDP. The next attempt is in 1,000 steps.",
        ),
    ],
)
def test_sentences_for_pages(sentences, expected):
    assert sentences.page == expected


@pytest.mark.parametrize(
    ("occasion", "step_s", "expected"),
    [
        (Occasion.SLOWER, 0.18, "a step takes 180 ms where 101 ms was usual (+78 %)"),
        (Occasion.FASTER, 0.05, "a step takes 50.0 ms where 101 ms was usual (-50 %)"),
        (Occasion.DUE, 0.1, "plans were compared again"),
    ],
)
def test_reasons_of_comparisons(occasion, step_s, expected):
    assert reason(occasion, step_s, 0.101) == expected


@pytest.mark.parametrize(
    ("now_s", "before_s", "text"),
    [
        (0.101, 0.266, "-62 %"),
        (1.02, 1.0, "+2.0 %"),
        (1.004, 1.0, "the same"),
        (3.0, 1.0, "+200 %"),
        (1.0, 0.0, "from 0"),
    ],
)
def test_changes(now_s, before_s, text):
    assert change(now_s, before_s) == text
