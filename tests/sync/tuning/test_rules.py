"""Rules of a tuned training: the compressors that are tried, and the steps at which tuning begins."""

from __future__ import annotations

import pytest

from gckernels import BlockQuant, EFSignSGD
from gckernels.compressor import from_spec
from gckernels.planner import proposer
from gckernels.sync import Auto
from gckernels.sync.accuracy.accuracy import as_accuracy, is_safe
from gckernels.sync.tuning.trials.rules import CANDIDATES, STEPS, stages_of


def test_safe_compressors_are_tried_at_once_and_nothing_else():
    (stage,) = stages_of("safe")
    assert (stage.name, stage.accuracy, stage.first_step) == ("safe", as_accuracy("safe"), 0)
    assert set(stage.methods) == {each for each in map(from_spec, CANDIDATES) if is_safe(each)}
    assert BlockQuant(bits=4) in stage.methods and EFSignSGD() not in stage.methods


def test_exact_averages_try_no_compressor():
    (stage,) = stages_of("exact")
    assert stage.methods == ()


def test_an_aggressive_rule_follows_a_safe_one_after_a_tenth_of_the_training():
    safe, aggressive = stages_of("aggressive", 5000)
    assert (safe.first_step, aggressive.first_step) == (0, 500)
    assert set(safe.methods) < set(aggressive.methods) and EFSignSGD() in aggressive.methods


def test_an_aggressive_rule_needs_the_steps_of_the_training():
    with pytest.raises(ValueError, match="steps"):
        stages_of("aggressive")


def test_a_short_training_is_tuned_once():
    (stage,) = stages_of("aggressive", 10 * 2 * STEPS - 10)
    assert stage.name == "aggressive" and stage.first_step == 2 * STEPS - 1


def test_a_list_is_tuned_with_its_safe_compressors_first():
    named = [EFSignSGD(), "BlockQuant"]
    safe, all_ = stages_of(named, 10_000)
    assert safe.methods == (BlockQuant(),) and safe.first_step == 0
    assert all_.methods == (EFSignSGD(), BlockQuant()) and all_.first_step == 1000
    assert stages_of(named) == stages_of(iter(named))
    assert [stage.first_step for stage in stages_of(named)] == [0]


def test_nothing_is_compressed_before_the_first_step_that_may_be():
    assert [stage.first_step for stage in stages_of("safe", first_step=70)] == [70]
    assert [stage.first_step for stage in stages_of("aggressive", 10_000, first_step=70)] == [70, 1000]


@pytest.mark.parametrize("accuracy", ["fast", 2.0, None, 3j])
def test_wrong_rules_are_refused(accuracy):
    with pytest.raises((TypeError, ValueError), match="accuracy"):
        stages_of(accuracy)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"replan": 1}, "replan must be True or False, got 1"),
        (
            {"propose": "planner"},
            "propose must be a function such as gckernels.planner.proposer, or None, got 'planner'",
        ),
    ],
)
def test_settings_of_other_types_are_refused(settings, text):
    with pytest.raises(TypeError, match=f"Auto: {text}"):
        Auto(**settings).phases(0)


def test_ranks_compare_what_proposes_plans():
    assert Auto(propose=proposer).lines(0) != Auto().lines(0)
