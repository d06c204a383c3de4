"""Sentences for pages are sentences: they begin with a capital, end with a period, and are short."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gckernels.sync.tuning.decisions.short_sentences import (
    compresses,
    drifted,
    failed,
    faster,
    link_changed,
    refined,
    restarted,
    resumed,
    stays_plain,
    tries_plain,
)
from gckernels.sync.tuning.decisions.tried import AccuracyRule, PlainSteps, Tried

RECORDED = PlainSteps(buckets=7, nbytes=29.4e6, plain_s=0.266, bare_s=0.058)
FOUR_BITS = Tried("14 BlockQuant(bits=4) by allgather, 3 exact", "auto", 0.096, 0.101, 0.13, 5.2948e6)
SAFE, COARSE = AccuracyRule("safe", 0.2), AccuracyRule("aggressive", 0.9)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            compresses(RECORDED, FOUR_BITS, [FOUR_BITS], SAFE, COARSE),
            "The fastest of 2 plans: 14 BlockQuant(bits=4) by allgather, 3 exact. 43.0 ms of a step still wait for "
            "communication; the rule aggressive follows later.",
        ),
        (
            compresses(replace(RECORDED, bare_s=0.1), FOUR_BITS, [], SAFE, None),
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
        (resumed(), "The saved plan goes on, without trials."),
        (restarted("its trials had not ended"), "The saved plan is tuned anew: its trials had not ended."),
        (drifted(0.18, 0.101), "Steps are 78 % longer than expected. New plans are made and tried."),
        (drifted(0.08, 0.1), "Steps are 20 % shorter than expected. New plans are made and tried."),
        (
            link_changed(2.8),
            "Steps wait for communication 2.80 times as long as before. New plans are made and tried.",
        ),
        (
            tries_plain(0.07, 0.066),
            "Compressed steps are 6.1 % longer than plain ones were. Plain ones are tried again.",
        ),
        (faster(0.5, 1.0), "Compressed steps are 50 % shorter than expected. Plain ones are tried again."),
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
def test_sentences_for_pages(text, expected):
    assert text == expected
