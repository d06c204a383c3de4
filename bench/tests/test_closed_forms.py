"""Closed forms of the Utility paper.

Its constants are from memory, so the numbers below guard the formulas against changes; they are not published output.
Only orders of the paper's 200 setups are tested: few pay, and those that do send factors of large models.
"""

from __future__ import annotations

import itertools

import pytest

from bench.planner.closed_forms import AGREES, ClosedForm, RingLink, closed_form_rows, main, sync_sgd
from command_files import small_trace
from gckernels.compressor import from_spec
from gckernels.planner.drafts.problem import Problem
from gckernels.planner.machines.files import load_machine
from gckernels.planner.timeline.pricing import Pricer
from gckernels.sync.accuracy.accuracy import allowed_compressors
from gckernels.sync.plans.plan import Frontend

BACKWARD_S, NBYTES = 0.122, 97e6  # ResNet-50, batch 64, one V100
CODEC_S = {"r4": 0.045, "r8": 0.064, "r16": 0.130, "top 1%": 0.240, "top 10%": 0.289, "top 20%": 0.295, "sign": 0.01634}
RATIO = {"r4": 72, "r8": 37, "r16": 19}
KEPT = {"top 1%": 0.01, "top 10%": 0.1, "top 20%": 0.2}


def compressed(method, link, backward_s=BACKWARD_S, nbytes=NBYTES):
    """A method of the paper; encoding takes longer in proportion to the size of the model."""
    codec_s = CODEC_S[method] * nbytes / NBYTES
    if method in RATIO:  # two factors, one after the other
        sending_s = 2 * link.allreduce_s(nbytes / RATIO[method] / 2)
    elif method in KEPT:  # values and indices of the same size, one after the other
        sending_s = 2 * link.allgather_s(nbytes * KEPT[method])
    else:
        sending_s = link.allgather_s(nbytes / 32)
    return ClosedForm(backward_s, codec_s, sending_s)


@pytest.mark.parametrize(
    ("method", "milliseconds"),
    [
        (None, (1528, 306, 165, 144, 134)),
        ("r4", (188, 171, 169, 168, 167)),
        ("sign", (1666, 444, 291, 199, 154)),
        ("top 1%", (1340, 558, 460, 401, 372)),
    ],
)
def test_64_ranks_take_what_the_formulas_say(method, milliseconds):
    for gbit, expected in zip((1, 5, 10, 25, 100), milliseconds, strict=True):
        link = RingLink(64, gbit * 1e9)
        form = sync_sgd(BACKWARD_S, NBYTES, link) if method is None else compressed(method, link)
        assert round(form.step_s * 1e3) == expected


def test_power_sgd_pays_below_9_gbit():
    def pays(bandwidth):
        link = RingLink(64, bandwidth)
        return compressed("r4", link).step_s < sync_sgd(BACKWARD_S, NBYTES, link).step_s

    assert [pays(gbit * 1e9) for gbit in (4.5, 8.95, 9.05, 18)] == [True, True, False, False]


def test_latency_counts_once_for_each_other_rank():
    slow, fast = RingLink(9, 1e9, latency_s=1e-3), RingLink(9, 1e9)
    assert slow.allreduce_s(1000) - fast.allreduce_s(1000) == pytest.approx(8e-3)
    assert slow.allgather_s(1000) - fast.allgather_s(1000) == pytest.approx(8e-3)
    for method in ("r4", "top 1%"):  # two collectives
        assert compressed(method, slow).step_s - compressed(method, fast).step_s == pytest.approx(2 * 8e-3)


def test_one_rank_sends_nothing():
    link = RingLink(1, 1e9, latency_s=1.0)
    assert sync_sgd(0.1, 1e9, link, slowdown=1.0).step_s == pytest.approx(0.1)
    assert compressed("sign", link).communicate_s == 0.0


def test_buckets_hide_behind_backward():
    link = RingLink(2, 8e9)  # 1 GB/s: an all-reduce of 25 MB takes 25 ms
    form = sync_sgd(1.0, 60e6, link, slowdown=1.1)
    assert form.hidden_s == pytest.approx(0.050)  # two buckets of 25 MB
    assert form.step_s == pytest.approx(1.1 + 0.010)
    assert sync_sgd(0.02, 60e6, link, slowdown=1.0).step_s == pytest.approx(0.060)
    assert sync_sgd(0.02, 50e6, link, slowdown=1.0).step_s == pytest.approx(0.050)  # no empty bucket behind


def test_parts_add_up():
    form = sync_sgd(BACKWARD_S, NBYTES, RingLink(16, 1e10))
    assert form.step_s == form.compute_s + form.codec_s + form.communicate_s - form.hidden_s
    assert 0 < form.hidden_s < form.communicate_s
    assert RingLink(4, 8e6).allreduce_s(1e6) == pytest.approx(1.5)


MODELS = {  # bytes of the gradients; seconds of backward for small, middle and usual batches, from ResNet-50's
    "resnet50": (97e6, (0.040, 0.065, 0.122)),
    "resnet101": (170e6, (0.070, 0.115, 0.215)),
    "bert-base": (418e6, (0.080, 0.150, 0.300)),
}
RANKS = (8, 16, 32, 64, 96)
METHODS = (*CODEC_S, *KEPT)  # MSTopK with the times of TopK


def setups_that_pay(batch):
    """Model, ranks and method wherever a step is a tenth faster at 10 Gbit/s."""
    setups = itertools.product(MODELS, RANKS, METHODS)
    return [
        (model, ranks, method)
        for model, ranks, method in setups
        if compressed(method, RingLink(ranks, 1e10), MODELS[model][1][batch], MODELS[model][0]).step_s
        < 0.9 * sync_sgd(MODELS[model][1][batch], MODELS[model][0], RingLink(ranks, 1e10)).step_s
    ]


def test_few_setups_pay_at_10_gbit():
    """The paper has measured that 6 of more than 200 setups pay, most of them BERT with PowerSGD.

    With usual batches the formulas say the same of 8 of 150. Encoding times of the larger models are not known, so they
    are taken to be in proportion to their size.
    """
    pay = setups_that_pay(batch=2)
    assert 0 < len(pay) <= 0.06 * len(MODELS) * len(RANKS) * len(METHODS)
    assert {model for model, _, _ in pay} == {"bert-base"}
    assert {method for _, ranks, method in pay if ranks > 16} <= {*RATIO}
    assert {ranks for _, ranks, method in pay if method == "r4"} == {*RANKS}


def test_larger_batches_need_less_compression():
    counts = [len(setups_that_pay(batch)) for batch in range(3)]
    assert counts == sorted(counts, reverse=True) and counts[0] > counts[2]


def rows_of(rule, frontend=Frontend.MODULE, **trace):
    """The rows of a small model on a slow machine, by name."""
    found = small_trace(**trace)
    problem = Problem(found, Pricer(load_machine("two-sites-1gbit")), frontend, allowed_compressors(found, rule))
    return {row.name: row for row in closed_form_rows(problem)}


def test_they_stand_beside_the_timeline():
    rows = rows_of("safe")
    assert {"none", "Cast16", "BlockQuant(bits=4)"} <= set(rows)
    for row in rows.values():
        assert bool(row.why) == (abs(row.difference) > AGREES)


def test_low_rank_methods_reduce_two_factors():
    """One after the other, after backward: on a slow link as long as on the timeline."""
    rows = rows_of([from_spec("PowerSGD(rank=2)")])
    assert 0 < rows["PowerSGD(rank=2)"].closed.step_s < rows["none"].closed.step_s


def test_none_hides_encoding():
    """With a long backward, the timeline hides what the closed forms add."""
    row = rows_of("safe", Frontend.DDP, backward_s=0.2, buckets=True)["BlockQuant"]
    assert row.closed.step_s > row.timeline_s and "hidden" in row.why


def test_the_command_prints_a_table(monkeypatch, capsys):
    words = ["closed_forms", "lstm", "espresso-pcie", "--compressors", "Cast16"]
    monkeypatch.setattr("sys.argv", words)
    main()
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("backward and sync") and [line.split()[0] for line in shown[1:]] == ["none", "Cast16"]
