"""The figures of a training are those of its steps and of its plan."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gckernels import sync
from gckernels.sync.stats.decisions import Decision
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of

ALWAYS = {
    *("step", "world_size", "plan", "policy", "units", "compressed_units", "sent_nbytes", "plain_nbytes"),
    *("saved_nbytes", "residual_nbytes", "decisions"),
}


TABLE_ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \|", re.MULTILINE)
BULLET = re.compile(r"^- .*|^  \S.*", re.MULTILINE)


def documented() -> tuple[set[str], set[str]]:
    """The names of figures in the documentation, and in the docstring of ``stats``."""
    page = Path(__file__).parents[3].joinpath("docs", "howto", "figures.md").read_text(encoding="utf-8")
    rows = "".join(TABLE_ROW.findall(page))
    bullets = "".join(BULLET.findall(inspect.getdoc(sync.Attachment.stats) or ""))
    return set(re.findall(r"`(\w+)`", rows)), set(re.findall(r"``(\w+)``", bullets))


def test_every_figure_is_documented_twice_and_alike():
    on_page, in_docstring = documented()
    assert on_page == in_docstring and ALWAYS | {"step_s", "speedup", "exposed_s", "error"} <= on_page


def train(compressor: str, with_ddp: bool, steps: int) -> dict[str, Any]:
    module, rank = build("Mlp"), dist.get_rank()
    handle: sync.Attachment
    if with_ddp:
        model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
        handle = sync.attach(model, compressor)
    else:
        model, handle = module, sync.attach(module, compressor)
    before = handle.stats()
    handle.on_step_end(lambda: None)  # without a listener, steps of plain DDP are not counted
    for step in range(steps):
        model(module.batch(step, rank)).backward()
    handle._figures.decide(Decision(steps, "chosen", "auto", handle.plan.fingerprint(), measured_s=1e-6, none_s=2e-6))
    handle._figures.journal.error = 0.5
    result = {"before": before, "after": handle.stats(), "samples": handle.samples, "text": repr(handle)}
    result |= {"sent": handle.sent_nbytes_per_step(), "numel": sum(each.numel() for each in module.parameters())}
    result |= {"decisions": handle.decisions, "traced": handle.recorded_step}
    handle.close()
    return result


def check(result: dict[str, Any], numel: int, steps: int) -> None:
    before, after = result["before"], result["after"]
    assert before.keys() >= ALWAYS and before["step"] == 0 and before["saved_nbytes"] == 0
    assert all(type(value) in (int, float, str) for value in after.values())
    assert (after["step"], after["world_size"], after["plan"]) == (steps, 2, before["plan"])
    assert after["plain_nbytes"] == 4 * numel and after["sent_nbytes"] == result["sent"]
    assert after["saved_nbytes"] == after["plain_nbytes"] - after["sent_nbytes"]
    assert (after["error"], after["policy"], after["decisions"]) == (0.5, "auto", 1)
    assert after["plain_s"] - after["step_s"] == pytest.approx(1e-6), "the plan saves so much of a step"
    assert after.keys() <= documented()[0]
    assert after["speedup"] == after["plain_s"] / after["step_s"]
    assert [each.step for each in result["samples"]] == [10]


def test_compression_has_residuals_and_stages():
    for result in values_of(run_ranks(2, train, "EFSignSGD", True, 12)):
        check(result, result["numel"], 12)
        after, (sample,) = result["after"], result["samples"]
        assert after["saved_nbytes"] > 0.9 * after["plain_nbytes"]
        assert after["residual_norm"] == sample.residual_norm > 0 and after["residual_nbytes"] > 0
        assert sample.sent_nbytes == (after["plain_nbytes"] + 9 * after["sent_nbytes"]) / 10  # the first step is exact
        assert after["hidden_s"] == result["traced"].hidden_s and after["exposed_s"] == result["traced"].exposed_s
        assert result["text"].startswith("Attachment(") and "EFSignSGD by allgather" in result["text"]
        assert "2 ranks" in result["text"] and "step 12" in result["text"] and "policy auto" in result["text"]
        assert [each.text for each in result["decisions"]] == ["chosen"]


def test_a_module_has_the_same_figures():
    for result in values_of(run_ranks(2, train, "BlockQuant(bits=4)", False, 11)):
        check(result, result["numel"], 11)
        assert result["text"].startswith("Attachment(") and "BlockQuant(bits=4)" in result["text"]


@pytest.mark.host_only("DDP times its steps on CPU and CUDA alone")
def test_plain_ddp_sends_everything_and_keeps_nothing():
    for result in values_of(run_ranks(2, train, "Identity", True, 12)):
        after = result["after"]
        assert (after["saved_nbytes"], after["residual_norm"], after["residual_nbytes"]) == (0, 0, 0)
        assert result["before"]["policy"] == "none" and after["compressed_units"] == 0
        assert "hidden_s" not in result["before"] and result["traced"] is None
        assert after["hidden_s"] >= 0 and after["exposed_s"] >= 0  # DDP times its first steps
        assert after["hidden_s"] + after["exposed_s"] > 0
