"""Tables of attachments that choose: every rule beside the fastest arm that is at least as accurate."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.lib.auto_tables import choices_table, chosen_compressors, steps_table
from bench.lib.contenders import accuracy_of

COLUMNS = "model,network,rate,arm,accuracy,rounds,median_s,ratio_to_plain,chosen,decision,attach_s,pause_s"


@pytest.fixture
def path(path_of) -> Path:
    """A file with two cells, the second one without hooks and with a policy that has no plan."""
    rows = []
    for arm, ratio in (
        ("plain", "1.0000"),
        ("plain again", "1.0100"),
        ("fp16_compress_hook", "0.5000"),
        ("auto, safe", "0.2000"),
        ("BlockQuant(bits=4)", "0.2100"),
        ("auto, aggressive", "0.1000"),
        ("EFSignSGD", "0.0900"),
    ):
        auto = ["88% BlockQuant(bits=4) through allgather", "step 61: 8 buckets, 4.24 MB; plain 46 ms", "0.04", "0.50"]
        chosen = auto if arm.startswith("auto") else [""] * 4
        rows.append(["digits", "2", "200mbit", arm, accuracy_of(arm), "9", str(0.2 * float(ratio)), ratio, *chosen])
    for arm, rounds in (("plain", "9"), ("auto, safe", "9"), ("policy mergecomp, safe", "0")):
        chosen = ["nothing", "step 110: nothing", "0.30", "0.20"] if arm.startswith("auto") else [""] * 4
        rows.append(["digits", "2x2", "none", arm, accuracy_of(arm), rounds, "0.01", "1.0000", *chosen])
    return path_of([dict(zip(COLUMNS.split(","), row, strict=True)) for row in rows])


def test_a_line_for_every_cell(path: Path) -> None:
    first, second = steps_table(path).splitlines()[2:]
    assert first == (
        "| digits, 0.15 M, 200 Mbit/s | 200 ms | 1.01 | 0.5 |  | **0.2** | 0.21 `BlockQuant(bits=4)` "
        "| **0.1** | 0.09 `EFSignSGD` |"
    )
    start = "| digits, 0.15 M, not throttled, 2 machines of 2 ranks | 10 ms"
    assert second.startswith(f"{start} |  |  |  | **1** | 1 plain DDP")


def test_a_line_for_every_cell_with_the_choices(path: Path) -> None:
    both, safe = choices_table(path).splitlines()[2:]
    choice = "88% `BlockQuant(bits=4)` | 61"
    assert both == f"| digits, 0.15 M, 200 Mbit/s | {choice} | {choice} |"
    assert safe == "| digits, 0.15 M, not throttled, 2 machines of 2 ranks | nothing | 110 |  |  |"


def test_small_shares_of_a_plan_are_left_out() -> None:
    chosen = "85.6% PowerSGD through powersgd, 14.3% BlockQuant(bits=4) through allgather, 0.1% nothing"
    assert chosen_compressors(chosen) == "86% `PowerSGD`, 14% `BlockQuant(bits=4)`"
    assert chosen_compressors("99.8% EFSignSGD(block=64, magnitude='mean') through alltoall, 0.2% Identity") == (
        "`EFSignSGD(block=64, magnitude='mean')`"
    )
    assert chosen_compressors("nothing") == "nothing"
