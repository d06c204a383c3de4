"""The verb ``advise``: an unchanged script is averaged in one way after the other, and ends early."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, replace

import pytest

from gckernels.planner import commands
from gckernels.planner.commands.advise import first_choice, parts_of
from gckernels.planner.commands.advising.averagings import GATHERS, GRADIENTS, PLAIN, UPDATES
from gckernels.planner.commands.advising.measuring import Advising, Measured, ScriptAdvice
from gckernels.planner.commands.common.outcome import Outcome
from gckernels.sync.tracing.script import ScriptError, measured_in_script
from ranks import run_ranks, values_of

BEGIN = """
import contextlib
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Tanh(), torch.nn.Linear(300, 5))
"""
ACCUMULATES = """
model = DDP(network)
optimizer = torch.optim.AdamW(model.parameters())
for step in range(100):
    optimizer.zero_grad()
    with torch.no_grad():
        model(torch.randn(8, 40))  # an evaluation is no step
    for number in range(3):
        with model.no_sync() if number < 2 else contextlib.nullcontext():
            model(torch.randn(8, 40)).square().mean().backward()
    optimizer.step()
raise RuntimeError("nobody has ended it")
"""
SETS_THE_FLAG = """
model = DDP(network)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    for number in range(2):
        model.require_backward_grad_sync = number == 1
        model(torch.randn(8, 40)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
raise RuntimeError("nobody has ended it")
"""
HAS_A_HOOK = """
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

model = DDP(network)
model.register_comm_hook(None, fp16_compress_hook)
for step in range(100):
    model(torch.randn(8, 40)).square().mean().backward()
raise RuntimeError("nobody has ended it")
"""
SHARDED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

for each in (network[0], network[2], network):
    fully_shard(each, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
for step in range(100):
    network(torch.randn(8, 40)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
raise RuntimeError("nobody has ended it")
"""
NUMEL = 40 * 300 + 300 + 300 * 5 + 5


def of_script(path: str) -> ScriptAdvice:
    begin = functools.partial(Advising, seconds=1.0)
    return measured_in_script(path, [], begin, lambda advising: advising.advice)


def advices(tmp_path, script: str) -> list[ScriptAdvice]:
    path = tmp_path / "train.py"
    path.write_text(BEGIN + script)
    return values_of(run_ranks(2, of_script, str(path), fresh=True, exits=False))


@pytest.mark.parametrize("script", [ACCUMULATES, SETS_THE_FLAG])
def test_every_way_of_a_ddp_model_is_measured(tmp_path, script):
    first, second = advices(tmp_path, script)
    assert [each.averaging for each in first.averagings] == [PLAIN, *GRADIENTS, *UPDATES]
    assert (first.ranks, first.numel, first.nbytes) == (2, NUMEL, 4 * NUMEL)
    assert not any(each.problem for each in first.averagings) and all(each.step_s > 0 for each in first.averagings)
    assert [each.step_s for each in first.averagings] == [each.step_s for each in second.averagings]
    plain, eight, four, signs, growing, rare = first.averagings
    assert plain.sent_nbytes == 4 * NUMEL and plain.memory_nbytes == 0
    assert plain.sent_nbytes > eight.sent_nbytes > four.sent_nbytes > signs.sent_nbytes > growing.sent_nbytes > 0
    assert four.sent_nbytes / 10 == pytest.approx(rare.sent_nbytes, rel=0.2)
    assert first.local_s is not None and 0 < first.local_s <= min(signs.step_s, growing.step_s, rare.step_s)


def test_ways_of_fsdp2_have_gathers_and_no_updates(tmp_path):
    for advice in advices(tmp_path, SHARDED):
        assert [each.averaging for each in advice.averagings] == [PLAIN, *GRADIENTS, *GATHERS]
        assert advice.local_s is None and not any(each.problem for each in advice.averagings)


def test_a_way_that_is_refused_says_why(tmp_path):
    for advice in advices(tmp_path, HAS_A_HOOK):
        refused = {each.averaging.name: each.problem for each in advice.averagings if each.problem}
        assert refused.keys() == {each.name for each in GRADIENTS}
        assert all("hook" in problem for problem in refused.values())
        assert "4 bits: " in Outcome(parts_of(advice)).text


def test_a_script_that_ends_too_early_says_so(tmp_path):
    with pytest.raises(AssertionError, match=r"train\.py: \d ways are measured"):
        advices(tmp_path, ACCUMULATES.replace("range(100)", "range(4)").replace("raise", "#"))
    assert issubclass(ScriptError, RuntimeError)


def advice_of(*steps_s: float, local_s: float = 0.01) -> ScriptAdvice:
    averagings = (PLAIN, *GRADIENTS, *UPDATES)
    return ScriptAdvice(
        "Net", 2, 1000, 4000, local_s, tuple(map(Measured, averagings, steps_s, [4000.0] * 6, [0.0] * 6))
    )


@pytest.mark.parametrize(
    ("steps_s", "number"),
    [
        ((1.0, 0.96, 0.97, 0.98, 0.99, 1.1), 0),  # nothing to gain
        ((1.0, 0.51, 0.50, 0.60, 0.60, 0.60), 1),  # the more exact one of two that are as fast
        ((1.0, 0.80, 0.50, 0.60, 0.55, 0.60), 2),
        ((1.0, 0.80, 0.50, 0.10, 0.08, 0.09), 4),
    ],
)
def test_the_first_choice_is_the_most_exact_of_the_fastest(steps_s, number):
    advice = advice_of(*steps_s)
    assert first_choice(advice) is advice.averagings[number]
    text = Outcome(parts_of(advice)).text
    assert "you wait 990 ms of the 1.00 s of a step" in text
    assert advice.averagings[number].averaging.line in text
    assert ("Nothing to gain here" in text) == (number == 0)
    assert (
        json.loads(json.dumps(Outcome(parts_of(advice)).record))["first_choice"]
        == advice.averagings[number].averaging.name
    )


def test_a_way_with_a_problem_is_never_chosen():
    advice = advice_of(1.0, 0.5, 0.5, 0.9, 0.9, 0.9)
    averagings = tuple(
        replace(each, step_s=0.0, problem="no") if each.averaging in GRADIENTS else each for each in advice.averagings
    )
    assert first_choice(replace(advice, averagings=averagings)).averaging is UPDATES[0]
    assert asdict(advice)["averagings"][0]["averaging"]["name"] == "plain"


def test_wrong_use(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for words, message in (
        (["--seconds", "0", "train.py"], "--seconds must be a number from 1 up, got 0.0"),
        (["train.py"], "one rank averages with nobody; start several: torchrun"),
    ):
        assert commands.main(["advise", *words]) == 2
        assert message in capsys.readouterr().err
