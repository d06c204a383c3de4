"""Figures in sentences of the documentation are those of the files of results.

Each check has a page, a pattern with a group for every figure, and a function that returns the figures as the page
writes them. Figures that were measured once, to decide something, have no file: their sentences name the commit.
"""

from __future__ import annotations

import csv
import json
import re
import statistics
from collections.abc import Callable, Iterable, Mapping

import pytest

from bench.lib.kernel_tables import ORDER
from bench.lib.updates_tables import best_rates, to_plain
from processes import ROOT

RESULTS = ROOT / "bench" / "results" / "cpu"
TRANSFORMER = {"model": "transformer_10m", "network": "2"}
FOUR_BITS, SIGNS = "BlockQuant(bits=4)", "EFSignSGD(block=1024, magnitude='projection')"
SPARSE = ("ChunkTopK", "TopK", "MSTopK", "GradDrop", "Threshold", "DGC", "RandomK")

Row = Mapping[str, str]


def rows(name: str, **cell: str) -> list[Row]:
    """The rows of a file of results with some values."""
    with open(RESULTS / f"{name}.csv", newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if cell.items() <= row.items()]


def number(found: Iterable[Row], column: str) -> float:
    """The number in a column of the only row."""
    (row,) = found
    return float(row[column])


def range_of(values: Iterable[float], digits: int = 2) -> list[str]:
    """The least and the largest number."""
    values = list(values)
    return [f"{min(values):.{digits}f}", f"{max(values):.{digits}f}"]


def step(arm: str, rate: str, name: str = "steps") -> str:
    return f"{number(rows(name, arm=arm, rate=rate, **TRANSFORMER), 'ratio_to_plain'):.2f}"


def speed_up() -> list[str]:
    row = rows("auto", arm="auto, safe", rate="200mbit", **TRANSFORMER)
    return [f"{1 / number(row, 'ratio_to_plain'):.1f}"]


def seconds_to(arm: str, rate: str, target: float = 3.5) -> float:
    """The seconds until a training was first evaluated as good as a target."""
    (row,) = rows("time_to_accuracy", model="bytes_lm", arm=arm, rate=rate)
    points = (tuple(map(float, point.split(":"))) for point in row["curve"].split())
    return next(seconds for seconds, metric in points if metric <= target)


def updates_speed_up(rate: str) -> float:
    return seconds_to("plain", rate) / seconds_to(f"{SIGNS}, every 2", rate)


def losses() -> list[str]:
    found = (rows("convergence", model="bytes_lm", compressor=arm) for arm in (FOUR_BITS, "none"))
    return [f"{statistics.fmean(float(row['bits_per_byte']) for row in each):.3f}" for each in found]


def lost_points() -> list[str]:
    """The most points of accuracy that compressors but RandomK lose in ten epochs, and how much RandomK loses."""
    found: dict[str, list[float]] = {}
    for row in rows("convergence", model="fashion_mnist_long"):
        found.setdefault(row["compressor"], []).append(100 * float(row["accuracy"]))
    means = {name: statistics.fmean(each) for name, each in found.items()}
    lost = {name: means["none"] - mean for name, mean in means.items() if name != "none"}
    assert 0.9 < lost.pop("RandomK") < 1.1
    assert max(lost.values()) < 0.55
    return ["0.55"]


def over_eager(names: Iterable[str]) -> list[str]:
    found = (rows("microbench", compressor=name, threads="2", numel=str(2**22), sources="1") for name in names)
    factors = [float(row["factor_over_eager"]) for each in found for row in each if row["factor_over_eager"]]
    return range_of(factors, 0)


def quantisers() -> list[str]:
    return over_eager(name for name in ORDER if name not in ("Identity", "Cast16", *SPARSE))


def in_no_time() -> list[str]:
    everything = [row for row in rows("steps", rate="none") if row["arm"][0].isupper() and row["arm"] != "Identity"]
    return range_of(float(row["ratio_to_plain"]) for row in everything)


def at_1_gbit() -> list[str]:
    arms = ("BlockQuant(bits=4)", "QSGD", "EFSignSGD", "PowerSGD(rank=4)", "ChunkTopK", "TopK(ratio=0.01)")
    return range_of(float(step(arm, "1gbit")) for arm in arms)


def predicted() -> list[str]:
    errors = [abs(float(row["error"])) for row in rows("predictions") if row["error"] and row["arm"] != "plain again"]
    regrets = [float(row["regret"]) for row in rows("predictions") if row["regret"]]
    within = sum(regret <= 0.03 for regret in regrets)
    return [f"{100 * statistics.median(errors):.1f}", str(within), str(len(regrets))]


def race() -> list[str]:
    cells: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows("race"):
        if int(row["rounds"]):
            cells.setdefault((row["network"], row["model"], row["rate"]), {})[row["arm"]] = row
    pairs = [(arms["auto, safe"], arms["predicted, safe"]) for arms in cells.values()]
    ratios = [float(alone["ratio_to_plain"]) / float(both["ratio_to_plain"]) for alone, both in pairs]
    stood = [[int(re.findall(r"\d+", row["decision"])[0]) for row in pair] for pair in pairs]
    first = min(alone for alone, _ in stood)
    earliest = min(both for _, both in stood)
    at_once = sum(alone == first for alone, _ in stood)
    median = f"{statistics.median(ratios):.3f}"
    return [str(len(pairs)), median, *range_of(ratios), str(at_once), str(first), str(earliest)]


def choices() -> list[str]:
    attach_s = max(float(row["attach_s"]) for row in rows("auto") if row["attach_s"])
    pause_s = max(float(row["pause_s"]) for row in rows("auto") if row["pause_s"])
    return [f"{attach_s:.1f}", f"{pause_s:.1f}"]


def hook(arm: str) -> list[str]:
    (row,) = rows("hook_overhead_2_ranks", arm=arm)
    return [f"{float(row[column]):.2f}" for column in ("ratio_to_plain", "cpu_ratio_to_plain")]


def times_as_fast(compressor: str) -> list[str]:
    found = (rows("topk", compressor=compressor, threads=threads) for threads in "12")
    return [f"{number(each, 'times_as_fast'):.0f}" for each in found]


def example(compressor: str) -> list[str]:
    (record,) = (
        each for each in json.loads((RESULTS / "examples.json").read_text()) if each["compressor"] == compressor
    )
    late_ms, nbytes = 1e3 * record["late_step_s"], record["sent_nbytes_per_step"]
    return [f"{late_ms:.1f}", f"{nbytes:,.0f}", f"{record['bits_per_byte']:.3f}", f"{record['total_s']:.1f}"]


def finetuned() -> list[str]:
    plain, auto = json.loads((RESULTS / "finetune.json").read_text())
    return [f"{plain['elements']:,}", *(f"{1e3 * each['step_s']:.0f}" for each in (plain, auto))]


def sharded(*arms: str) -> Callable[[], list[str]]:
    def figures() -> list[str]:
        ratios = [number(rows("sharded", arm=arm, network="2x2", rate="20mbit"), "ratio_to_native") for arm in arms]
        return [f"{ratio:.{1 if ratio > 1 else 2}f}" for ratio in ratios]

    return figures


def sharded_errors() -> list[str]:
    errors = [-100 * float(row["error"]) for row in rows("sharded_predictions", arm="native", network="2")]
    return range_of(errors, 0)


def update_steps(*cells: tuple[str, str]) -> Callable[[], list[str]]:
    return lambda: [
        f"{number(rows('updates_steps', arm=arm, model=model, rate='none'), 'ratio_to_plain'):.2f}"
        for model, arm in cells
    ]


def update_errors() -> list[str]:
    """The errors of predictions for rounds of 30 steps at both rates, and the range of those for signs."""
    found = rows("updates_steps", model="transformer_10m")
    errors = {(row["arm"], row["rate"]): 100 * float(row["error"]) for row in found if row["error"]}
    long = [errors.pop((f"{FOUR_BITS}, every 30", rate)) for rate in ("20mbit", "200mbit")]
    return [f"{abs(error):.0f}" for error in long] + range_of((-error for error in errors.values()), 0)


def lost_by_gradients() -> list[str]:
    """The most bits that signs of updates lose, at least, and the range of the loss of signs of gradients."""
    found = best_rates(rows("updates")).values()
    lost = [
        [statistics.fmean(to_plain(results, arm)) for results in found]
        for arm in ("signs, H = 2, decay 0.8", "gradients: signs by the mean")
    ]
    assert max(map(abs, lost[0])) <= 0.02
    return ["0.02", *range_of(lost[1])]


WHICH, NO_COMPILER, FSDP, LINK = (
    f"docs/howto/{name}.md" for name in ("which_compressor", "no_compiler", "fsdp", "slow_link")
)
MEASURED, AUTO = "docs/measurements.md", "docs/measurements/auto.md"
N = r"([\d.,]*\d)"
CHECKS: list[tuple[str, str, Callable[[], list[str]]]] = [
    ("README.md", rf"\*\*{N} times as fast\*\*", speed_up),
    ("README.md", rf"takes {N} of plain DDP's", lambda: [step("auto, safe", "200mbit", "auto")]),
    ("README.md", rf"\*\*{N} times as fast over 2 Mbit/s\*\*", lambda: [f"{updates_speed_up('2mbit') // 5 * 5:.0f}"]),
    ("README.md", rf"ends at {N} bits per byte, and at {N}", losses),
    (LINK, rf"at 2 Mbit/s is then {N} times as fast", lambda: [f"{updates_speed_up('2mbit') // 5 * 5:.0f}"]),
    (
        LINK,
        rf"takes {N} of plain DDP's, and a round of one step {N}; with one million parameters both take {N} and more",
        lambda: [
            *update_steps(
                ("transformer_10m", f"{SIGNS}, direction, decay 0.8"), ("transformer_10m", f"{SIGNS}, every 1")
            )(),
            *update_steps(("transformer_1m", f"{SIGNS}, direction, decay 0.8"))(),
        ],
    ),
    (
        LINK,
        rf"are {N} % too short at 20 Mbit/s and {N} % too long at 200.*?they are {N} to {N} % too short",
        update_errors,
    ),
    (
        WHICH,
        rf"`BlockQuant` takes {N} of.+`EFSignSGD` {N} and `TopK\(ratio=0.01\)` {N},",
        lambda: [step(arm, "1gbit") for arm in ("BlockQuant", "EFSignSGD", "TopK(ratio=0.01)")],
    ),
    (WHICH, rf"but `RandomK` are within {N} points", lost_points),
    (WHICH, rf"within {N} bits of plain DDP's.*?signs of gradients lose {N} to {N} ", lost_by_gradients),
    (NO_COMPILER, rf"quantisers take {N} to {N} times", quantisers),
    (NO_COMPILER, rf"sparsifiers {N} to {N} times", lambda: over_eager(SPARSE)),
    (NO_COMPILER, rf"casts {N} to {N} times", lambda: over_eager(["Cast16"])),
    ("docs/install.md", rf"are {N} to {N} times slower", quantisers),
    ("docs/howto/trainers.md", rf"With {N} parameters a step takes {N} ms without it, and {N} ms", finetuned),
    (FSDP, rf"over all ranks are predicted {N} to {N} % too short", sharded_errors),
    (
        FSDP,
        rf"over all ranks takes {N} times.*?with 4 bits need {N} of a step, shards {N} with.*?{N} in 4, or {N} if",
        sharded(
            "native, shards over all ranks",
            FOUR_BITS,
            f"{FOUR_BITS}, weights BlockQuant, shards over all ranks",
            f"{FOUR_BITS}, weights {FOUR_BITS}, shards over all ranks",
            f"{FOUR_BITS}, weights {FOUR_BITS}, added up inside machines",
        ),
    ),
    (MEASURED, rf"take {N} to {N} of plain DDP's step. On links that are not", at_1_gbit),
    (MEASURED, rf"not throttled, compressors take {N} to {N} of it", in_no_time),
    (MEASURED, rf"the median error is {N} %.*?accuracy in {N} of {N} cases", predicted),
    (MEASURED, rf"quantisers are {N} to {N} times as fast", quantisers),
    (MEASURED, rf"Fashion-MNIST they are within {N} points", lost_points),
    (AUTO, rf"in {N} cells.*?take {N} of those.*?\({N} to {N}\)\. In {N} of.*?after {N} steps.*?after {N} at", race),
    (AUTO, rf"Attaching took {N} s at most.*?at most {N} s longer", choices),
    *(
        (MEASURED, rf"\| {name} \| {N} \| {N} \|", lambda arm=arm: hook(arm))
        for name, arm in (
            ("plain DDP again", "plain again"),
            ("a plan that compresses nothing, attached", "identity allreduce"),
            (r"after `close\(\)`", "closed"),
            ("torch's `allreduce_hook`", "torch's hook"),
            ("a plan that compresses nothing, with a bare module", "module allreduce"),
            ("encoded, gathered and decoded, with the hook", "identity allgather"),
            ("encoded, gathered and decoded, with a bare module", "module allgather"),
        )
    ),
    *(
        (MEASURED, rf"\| `{re.escape(arm)}` \| {N} \| {N} \|", lambda arm=arm: times_as_fast(arm))
        for arm in (
            "TopK",
            "MSTopK",
            "GradDrop",
            "DGC",
            "Threshold(tau=2.575, ratio=0.01)",
            "ChunkTopK(chunk=1024, k=8)",
        )
    ),
    *(
        (MEASURED, rf"\| {name} \| {N} ms \| {N} \| {N} \| {N} s \|", lambda arm=arm: example(arm))
        for name, arm in (
            ("plain DDP", "none"),
            ("PyTorch's fp16 hook", "fp16 hook"),
            (r"`sync.attach\(model\)`", "auto"),
            ("`sync.Updates`, every second step in signs", "updates"),
        )
    ),
]


@pytest.mark.parametrize(("page", "pattern", "figures"), CHECKS)
def test_figures_in_sentences_are_those_of_their_results(page, pattern, figures):
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())  # lines break anywhere
    (found,) = re.findall(pattern, text)
    assert list(found if isinstance(found, tuple) else [found]) == figures()
