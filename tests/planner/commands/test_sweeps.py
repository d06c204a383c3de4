"""``gckernels plan --sweep`` finds where compression pays: over sweeps, up to which bandwidth, and with which ratio."""

from __future__ import annotations

import pytest

from command_files import run_json, run_text, small_trace, write_small_trace
from gckernels.planner.commands.common.outcome import CommandError
from gckernels.planner.commands.studies import prediction, sweeps
from gckernels.planner.machines.files import load_machine
from gckernels.planner.machines.machine import Shared
from gckernels.sync import Plan

MACHINE = "two-sites-1gbit"
QUICK = ("--policy", "all:Cast16")


@pytest.fixture
def trace(tmp_path):
    return write_small_trace(tmp_path)


def test_sweeps_in_text_json_and_picture(trace, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    plan, picture = tmp_path / "plan.json", tmp_path / "sweeps.png"
    sweep = ("--sweep", "bandwidth=100mbit:100gbit", "machines=2,4", "batch=1,100", "encode=1,2")
    arguments = ("plan", trace, MACHINE, *sweep, *QUICK)
    code, shown, errors = run_text(capsys, *arguments, "-o", str(plan), "--png", str(picture))
    assert code == 0 and errors.count("is written") == 2 and picture.stat().st_size > 10_000
    assert Plan.load(plan).prediction.policy == QUICK[1]
    assert "100 Mbit/s" in shown and "does not pay" in shown
    _, found = run_json(capsys, *arguments)
    by_name = {each["name"]: each for each in found["sweeps"]}
    steps = [point["none_s"] for point in by_name["bandwidth"]["points"]]
    assert len(steps) == 10 and steps == sorted(steps, reverse=True)
    assert [point["pays"] for point in by_name["bandwidth"]["points"]][:1] == [True]
    slow, fast = by_name["encode"]["points"]
    assert fast["step_s"] <= slow["step_s"]
    once, often = by_name["batch"]["points"]
    assert once["pays"] and not often["pays"]  # a backward of two seconds hides everything


def test_the_limit_is_where_the_advice_turns(trace, capsys):
    _, found = run_json(capsys, "plan", trace, MACHINE, *QUICK, "--sweep")
    limit = found["limit"]["bandwidth_bit_per_s"]
    ends = f"bandwidth={limit / 1.03 / 1e9:.6f}gbit,{limit * 1.05 / 1e9:.6f}gbit"
    _, around = run_json(capsys, "plan", trace, MACHINE, *QUICK, "--sweep", ends)
    assert [point["pays"] for point in around["sweeps"][0]["points"]] == [True, False]


def test_enough_is_enough(trace, capsys):
    """A machine with links that are faster by the ratio needs no compression."""
    _, found = run_json(capsys, "plan", trace, MACHINE, *QUICK, "--sweep")
    enough = found["enough"]
    assert enough["ratio"] > 1 and enough["step_s"] <= prediction.NEAR * enough["least_s"]
    _, faster = run_json(capsys, "plan", trace, "h100-400gbit", *QUICK, "--sweep")
    assert faster["enough"]["ratio"] < enough["ratio"]


def test_it_does_not_pay_here(tmp_path, capsys):
    trace = write_small_trace(tmp_path, backward_s=1.0)
    code, shown, _ = run_text(capsys, "plan", trace, "h100-400gbit", *QUICK, "--sweep")
    assert code == 1 and "Do not compress" in shown and "No ratio of compression is needed here" in shown


def test_a_limit_is_found_with_few_searches():
    searched = []

    def found_at(bandwidth):
        searched.append(bandwidth)
        return bandwidth < 3e9

    found = prediction.bandwidth_limit(lambda bandwidth: bandwidth < 1e9 or bandwidth in searched, found_at)
    assert 1e9 / prediction.EXACT <= found.bandwidth_bit_per_s <= 1e9 * prediction.EXACT**8
    assert len(searched) <= 6


@pytest.mark.parametrize(("pays", "always"), [(True, True), (False, False)])
def test_there_may_be_no_limit(pays, always):
    found = prediction.bandwidth_limit(lambda bandwidth: pays, lambda bandwidth: pays)
    assert found == prediction.BandwidthLimit(None, always)


def test_values_of_a_range():
    assert sweeps.sweep_from("bandwidth=100mbit:2gbit").values == pytest.approx((1e8, 2e8, 5e8, 1e9, 2e9))
    assert sweeps.sweep_from("bandwidth=30mbit:70mbit").values == pytest.approx((3e7, 5e7, 7e7))
    assert sweeps.sweep_from("machines=2:12").values == (2, 4, 8, 12)
    assert sweeps.sweep_from("batch=0.5,2").values == (0.5, 2)


@pytest.mark.parametrize(
    "text",
    [
        *("bandwidth", "bandwidth=", "latency=1", "bandwidth=fast", "bandwidth=2gbit:1gbit", "machines=0"),
        *("machines=1.5", "batch=-1", "batch=nan", "encode=inf", "machines=1:2:3"),
        f"machines={','.join(map(str, range(1, 60)))}",
    ],
)
def test_wrong_sweeps_are_refused(text, trace, capsys):
    with pytest.raises(CommandError):
        sweeps.sweep_from(text)
    code, _, errors = run_text(capsys, "plan", trace, MACHINE, "--sweep", text)
    assert code == 2 and "--sweep" in errors


def test_a_batch_scales_the_computing():
    twice = sweeps.with_batch(small_trace(), 2.0)
    assert twice.backward_s == pytest.approx(2 * small_trace().backward_s)
    assert twice.tensors[-1].ready_s == pytest.approx(twice.backward_s)


@pytest.mark.parametrize("name", ["lab", "espresso-nvlink"])
def test_faster_links_are_faster_whatever_limits_them(name):
    machine = load_machine(name)
    faster = sweeps.with_faster_links(machine, 2.0)
    assert faster.links[Shared.INTER].byte_per_s == pytest.approx(2 * machine.links[Shared.INTER].byte_per_s)
