"""Tests of the arguments that bound launches pass to a driver, and of the benchmark of their cost."""

from __future__ import annotations

from pathlib import Path

from processes import output_of


def test_bound_launches_pass_the_right_arguments_to_a_driver():
    assert output_of(Path(__file__).with_name("bound_launches.py")).count("check_") == 5
