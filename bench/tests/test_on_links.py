"""Tests of the measurements on links of a known rate: they say why they cannot run, and they write their rows."""

from __future__ import annotations

import importlib
import os
import shutil
import sys

import pytest

from bench_runs import rows_of
from gckernels.sync import lab
from network_namespaces import need_links
from processes import output_of

RIVALS = ("auto, safe", "fp16_compress_hook", "Cast16", "policy all, safe", "policy espresso, safe")


@pytest.mark.parametrize(
    "command",
    ["steps", "auto", "drift", "predictions", "sharded"],
)
def test_commands_say_why_and_end(monkeypatch, capsys, command):
    module = importlib.import_module(f"bench.sync.{command}")
    monkeypatch.delenv(lab.RATE, raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda tool: f"/usr/sbin/{tool}")
    monkeypatch.setattr(sys, "argv", [f"{command}.py"])
    assert module.main() == 2
    assert capsys.readouterr().err == f"{command}.py: network namespaces and rates of links need root\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "options", "arms"),
    [
        ("steps", ["--models", "transformer_1m", "--arms", "EFSignSGD", "--rates", "1gbit"], 2),
        ("auto", ["--models", "digits", "--rates", "1gbit", "--at-once", "3", "--arms", *RIVALS], 7),
        ("drift", ["--models", "digits", "--changes", "throttle", "--before", "5", "--steps", "40"], 3),
        ("sharded", ["--rates", "1gbit", "--arms", "BlockQuant(bits=4), weights BlockQuant", "auto"], 3),
    ],
)
def test_measurements_on_links(out, command, options, arms):
    need_links()
    output_of("-m", f"bench.sync.{command}", "--rounds", "2", *options)
    (path,) = out.glob("*.csv")
    rows = rows_of(path)
    assert len(rows) == arms and {row["rate"] for row in rows} == {"1gbit"}
    assert {row["network"] for row in rows} == {"2"}
    if command == "steps":  # headers, and nothing sent twice; no link is faster than its rate
        assert all(1 < float(row["wire_over_sent"]) < 1.5 for row in rows)
        assert all(0 < float(row["goodput_mbit_per_s"]) <= 1000 for row in rows)
    if command == "auto":
        assert [row["arm"] for row in rows] == sorted([*RIVALS, "plain", "plain again"])
        assert all(float(row["wire_nbytes"]) > 0 and float(row["cpu_s"]) > 0 for row in rows)
        # noise can make the trials last longer than so few rounds
        assert all(row["arm"] == "auto, safe" for row in rows if row["decision"])
    if command == "drift":
        assert {row["arm"]: bool(row["curve"]) for row in rows} == {"followed": True, "fresh": False, "plain": False}
