"""Tables of attachments that choose: every rule beside the fastest arm that is at least as accurate."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.lib.auto_tables import choices_table, steps_table
from bench.lib.contenders import accuracy_of

COLUMNS = (
    "model,network,rate,arm,accuracy,rounds,median_s,ratio_to_plain,chosen,predicted_s,attach_s,tuning_steps,pause_s"
)


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
        auto = ["88% BlockQuant(bits=4) through allgather", "0.042", "10.00", "61", "0.50"]
        chosen = auto if arm.startswith("auto") else [""] * 5
        rows.append(["digits", "2", "200mbit", arm, accuracy_of(arm), "9", str(0.2 * float(ratio)), ratio, *chosen])
    for arm, rounds in (("plain", "9"), ("auto, safe", "9"), ("policy mergecomp, safe", "0")):
        rows.append(
            ["digits", "2x2", "none", arm, accuracy_of(arm), rounds, "0.01", "1.0000", "nothing", "", "", "62", ""]
        )
    return path_of([dict(zip(COLUMNS.split(","), row, strict=True)) for row in rows])


def test_a_line_for_every_cell(path: Path) -> None:
    first, second = steps_table(path).splitlines()[2:]
    assert first == (
        "| digits, 0.15 M, 200 Mbit/s | 200 ms | 1.01 | 0.5 |  | **0.2** | 0.21 `BlockQuant(bits=4)` "
        "| **0.1** | 0.09 `EFSignSGD` |"
    )
    start = "| digits, 0.15 M, not throttled, 2 machines of 2 ranks | 10 ms"
    assert second.startswith(f"{start} |  |  |  | **1** | 1 plain DDP")


def test_a_line_for_every_choice(path: Path) -> None:
    safe, aggressive, other = choices_table(path).splitlines()[2:]
    start = "| digits, 0.15 M, 200 Mbit/s | safe | 88% BlockQuant(bits=4) through allgather"
    assert safe == f"{start} | +5% | 10.00 s | 61 | 500 ms |"
    assert "| aggressive |" in aggressive and "| +110% |" in aggressive
    assert other == "| digits, 0.15 M, not throttled, 2 machines of 2 ranks | safe | nothing |  |  | 62 |  |"
