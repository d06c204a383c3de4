"""Tests of the tables and of the picture that are made from the rows of training steps."""

from __future__ import annotations

import pytest

from bench.lib.step_tables import all_tables, readme_table

ARMS = {"plain": 4000, "plain again": 4000, "fp16_compress_hook": 2000, "Cast16": 2010, "EFSignSGD": 160}


@pytest.fixture
def path(path_of):
    rows = []
    for network in ("2", "2x2"):
        for rate, slowness in (("50mbit", 8), ("100mbit", 4), ("1gbit", 1)):
            for arm, nbytes in ARMS.items():
                ratio = nbytes / 4000
                row = {"model": "transformer_10m", "network": network, "rate": rate, "arm": arm, "sent_nbytes": nbytes}
                rows.append(row | {"median_s": 0.4 * slowness * ratio, "ratio_to_plain": ratio})
    return path_of(rows)


def test_the_table_for_the_readme(path, path_of):
    row = {"model": "transformer_10m", "network": "2", "arm": "auto, safe", "sent_nbytes": "500"}
    row |= {"median_s": 0.4, "ratio_to_plain": 0.125}
    others = [row | {"model": "mlp"}, row | {"rate": "50mbit"}, row | {"arm": "auto, aggressive"}]
    steps_path = path.rename(path.with_name("steps.csv"))
    auto_path = path_of([{"rate": "100mbit"} | each for each in (row, *others)])
    assert readme_table(steps_path, auto_path).splitlines() == [
        "|  | bytes per step | 100 Mbit/s | 1 Gbit/s |",
        "| --- | --- | --- | --- |",
        "| plain DDP | 4,000 | 1.60 s | 400 ms |",
        "| PyTorch's fp16 hook | 2,000 | 0.50 | 0.50 |",
        "| `sync.attach(model)` | 500 | 0.12 |  |",
    ]


def test_all_tables(path):
    text = "\n\n".join(all_tables(path))
    assert "**transformer, 10.0 million parameters, 2 machines of 2 ranks**" in text
    assert text.count("| `EFSignSGD` | 160 | 0.040 | 0.040 | 0.040 |") == 2


def test_the_picture_is_drawn(path):
    pytest.importorskip("matplotlib", reason="needs the extra 'bench'")
    from bench.lib.speedup import draw_speedup

    picture = draw_speedup(path, "transformer_10m")
    assert picture.name == "rows_transformer_10m.png"
    assert 0 < picture.stat().st_size < 150_000
    with pytest.raises(SystemExit, match="no rows of mlp"):
        draw_speedup(path, "mlp")
