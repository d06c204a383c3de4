"""``examples/finetune.py`` trains with the Trainer of Transformers over links, and sends less with compression."""

from __future__ import annotations

import json

import pytest

from network_namespaces import need_links
from processes import output_of


def test_the_trainer_sends_less_over_a_link(tmp_path):
    pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    need_links()
    path = tmp_path / "records.json"
    options = ("--steps", "6", "--plan", "BlockQuant(bits=4)", "--json", str(path))
    printed = output_of("-m", "examples.finetune", *options, interprets=True, timeout_s=280)
    before, after = json.loads(path.read_text())
    # the parameters of rank 0 and an exact first step are sent in both
    assert after["sent_nbytes_per_step"] < 0.6 * before["sent_nbytes_per_step"]
    assert after["loss"] == pytest.approx(before["loss"], rel=0.05)
    assert "(1.0 times as fast)" in printed and "Trainer with Compression('BlockQuant(bits=4)')" in printed
