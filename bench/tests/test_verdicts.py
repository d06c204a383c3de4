"""Tests of the bars for attachments that choose their plan."""

from __future__ import annotations

import pytest

from bench.lib.arms import AGAIN, FP16_HOOK, PLAIN, POWERSGD_HOOK
from bench.lib.contenders import accuracy_of
from bench.lib.verdicts import Finding, Verdict, choices, findings_of, judged

SAFE, AGGRESSIVE = "auto, safe", "auto, aggressive"


def rows_of(ratios, model="digits", rate="1gbit", error=0.001, **columns):
    common = {"model": model, "network": "2", "rate": rate, "rounds": "5", "ratio_error": str(error)}
    common |= {"chosen": "BlockQuant", "attach_s": "", "pause_s": ""} | columns
    return [
        common | {"arm": arm, "accuracy": accuracy_of(arm), "ratio_to_plain": str(ratio)}
        for arm, ratio in ratios.items()
    ]


def verdicts(rows):
    return {finding.bar: finding.verdict for finding in findings_of(rows)}


def test_a_step_may_take_a_fiftieth_longer_than_that_of_plain_ddp():
    noisy = {PLAIN: 1.0, AGAIN: 1.02}
    bar = "step over that of plain DDP"
    assert verdicts(rows_of(noisy | {SAFE: 1.02}))[bar] is Verdict.MET
    assert verdicts(rows_of(noisy | {SAFE: 1.03}))[bar] is Verdict.MISSED
    assert verdicts(rows_of(noisy | {SAFE: 1.03}, error=0.01))[bar] is Verdict.OPEN
    quiet = {PLAIN: 1.0, AGAIN: 1.002}
    assert verdicts(rows_of(quiet | {SAFE: 1.015}))[bar] is Verdict.MISSED


def test_the_best_arm_of_an_accuracy_is_no_less_accurate():
    ratios = {PLAIN: 1.0, AGAIN: 1.0, SAFE: 0.5, FP16_HOOK: 0.52, "EFSignSGD": 0.1, POWERSGD_HOOK: 0.2}
    found = {finding.bar: finding for finding in findings_of(rows_of(ratios | {AGGRESSIVE: 0.1}))}
    safe, aggressive = (found[f"step over the best of its accuracy, {name}"] for name in ("safe", "aggressive"))
    assert (safe.verdict, safe.value) == (Verdict.MET, pytest.approx(0.5 / 0.52))
    assert aggressive.remark.startswith("against EFSignSGD")
    slow = verdicts(rows_of(ratios | {AGGRESSIVE: 0.11}))
    assert slow["step over the best of its accuracy, aggressive"] is Verdict.MISSED


def test_slow_links_have_bars_of_their_own():
    ratios = {PLAIN: 1.0, AGAIN: 1.0, FP16_HOOK: 0.5, POWERSGD_HOOK: 0.1, SAFE: 0.3, AGGRESSIVE: 0.09}
    found = verdicts(rows_of(ratios, model="transformer_10m", rate="200mbit"))
    assert found[f"{SAFE}: step over that of {PLAIN}"] is Verdict.MET
    assert found[f"{SAFE}: step over that of {FP16_HOOK}"] is Verdict.MET
    assert found[f"{AGGRESSIVE}: step over that of {PLAIN}"] is Verdict.MET
    assert found[f"{AGGRESSIVE}: step over that of {POWERSGD_HOOK}"] is Verdict.MISSED
    assert not any(bar.startswith(SAFE) for bar in verdicts(rows_of(ratios, model="transformer_10m")))


def test_an_idle_attachment_costs_little_and_no_pause_is_long():
    ratios = {PLAIN: 1.0, AGAIN: 1.0, SAFE: 1.008}
    found = verdicts(rows_of(ratios, chosen="nothing", attach_s="9.5", pause_s="1.4"))
    assert found["step over plain DDP's where nothing pays"] is Verdict.MISSED
    assert found["seconds of the call that attaches"] is Verdict.MET
    assert found["seconds of the longest pause"] is Verdict.MISSED


def test_arms_without_rounds_are_left_out():
    rows = [*rows_of({PLAIN: 1.0, AGAIN: 1.0, SAFE: 0.5}), *rows_of({"policy espresso, safe": 0.1}, rounds="0")]
    assert set(verdicts(rows).values()) == {Verdict.MET}


def test_the_tables_name_the_worst_cell_and_everything_that_is_not_met():
    good = rows_of({PLAIN: 1.0, AGAIN: 1.0, SAFE: 0.5}, rate="50mbit")
    text, missed = judged(good)
    assert not missed and "missed |" in text and "digits 2 50mbit" in text
    text, missed = judged([*good, *rows_of({PLAIN: 1.0, AGAIN: 1.0, SAFE: 1.2})])
    assert missed and "| missed | step over that of plain DDP | digits 2 1gbit | auto, safe | 1.200 ± 0.001 |" in text


def test_choices_have_their_best_rival_and_the_error_of_their_prediction():
    rows = rows_of({PLAIN: 1.0, FP16_HOOK: 0.5, "EFSignSGD": 0.1, SAFE: 0.6}, median_s="0.2", predicted_s="0.21")
    (line,) = choices(rows).splitlines()[2:]
    assert line == "| digits 2 1gbit | auto, safe | BlockQuant | 200 ms | 0.6 | 1.200 | fp16_compress_hook | +5.0% |"


def test_a_value_within_two_errors_of_its_bar_is_open():
    assert [Finding("", 1.0, "", "", value, 0.1, "").verdict for value in (1.0, 1.1, 1.3)] == list(Verdict)
