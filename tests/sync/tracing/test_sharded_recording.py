"""Recordings of models of FSDP2: the training stays the same bit for bit, and the trace has the groups and gathers."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from gckernels import sync
from gckernels.ops import BlockQuant
from gckernels.planner.drafts.problem import shards_of
from gckernels.sync.frontends.sharded.shard_groups import shard_groups
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import Role, TracedGather, TracedTensor, TraceError
from gckernels.sync.tracing.script import measured_in_script
from ranks import run_ranks, values_of
from sharded_models import SETTINGS, adamw, digest, model_of, split, train

STEPS, WARMUP = 3, 1
FORMS = {
    "fsdp": (2, ["plain", "accumulates", "frozen", "bf16", "prefetches", "keeps parameters", "groups"]),
    "hsdp": (4, ["plain", "bf16"]),
    "replicate": (2, ["plain"]),
}
"""The number of ranks and the settings of each form."""


def recorded(names: list[str], form: str) -> dict[str, tuple[list[str], list[str], str]]:
    """By setting: digests without a recording and with one, what FSDP collects with after it, and the trace."""
    found = {}
    for name in names:
        setting, digests = SETTINGS[name], []
        for records in (False, True):
            model = model_of(setting, form)
            recording = None
            if records:
                recording = sync.trace_model(model, STEPS, warmup=WARMUP, compressors=[BlockQuant()])
            train(model, setting, range(STEPS + WARMUP + 1), adamw(model))
            digests.append(digest(model))
        assert recording is not None and recording.done
        groups = shard_groups(model)
        collectives = [each for group in groups for each in (group.all_gather, group.reduce_scatter, group.averaging)]
        found[name] = (digests, [type(each).__module__ for each in collectives], recording.trace.to_text())
    return found


@functools.cache
def results(form: str) -> list[dict[str, tuple[list[str], list[str], str]]]:
    """The results of all ranks, by setting."""
    ranks, names = FORMS[form]
    return values_of(run_ranks(ranks, recorded, names, form, fresh=True, exits=False))


@pytest.mark.parametrize("form", FORMS)
def test_a_recording_changes_nothing_and_has_every_group(form):
    first, *others = results(form)
    for name, (digests, collectives, text) in first.items():
        assert digests[0] == digests[1], name
        assert not any(each.startswith("gckernels") for each in collectives), name
        assert all(other[name][2] == text for other in others), name
        trace = ModelTrace.from_text(text, name)
        tensors = sorted(each.name for each in trace.tensors)
        assert sorted(each for bucket in trace.buckets for each in bucket) == tensors
        assert all(tensor.errors and tensor.norm for tensor in trace.tensors), name
        assert trace.forward_s > 0 and trace.backward_s > 0
        gathered = {each.names for each in trace.gathers}
        assert bool(gathered) != (form == "replicate")
        assert set(trace.buckets) <= gathered or form == "replicate" or name == "keeps parameters"


def test_gathers_are_in_forward_and_in_backward():
    """The root keeps its parameters from forward on. The others are gathered again, in the opposite order."""
    trace = ModelTrace.from_text(results("fsdp")[0]["plain"][2], "plain")
    names = ("second.weight", "first.weight", "last.weight")
    root, first, last = (next(bucket for bucket in trace.buckets if name in bucket) for name in names)
    assert [each.names for each in trace.gathers] == [root, first, last, last, first]
    assert trace.buckets == (last, root, first)  # the first layer is reduced when backward ends
    needed_s = [each.needed_s for each in trace.gathers]
    assert needed_s == sorted(needed_s) and needed_s[0] < trace.forward_s < needed_s[-1]
    assert next(tensor.shape for tensor in trace.tensors if tensor.name == "first.weight") == (33, 7)
    assert not any(each.frozen_numel for each in trace.gathers)


def test_frozen_parameters_are_gathered_and_have_no_gradient():
    trace = ModelTrace.from_text(results("fsdp")[0]["frozen"][2], "frozen")
    assert {each.frozen_numel for each in trace.gathers if "first.bias" in each.names} == {33 * 7}
    assert "first.weight" not in {tensor.name for tensor in trace.tensors}


class Slow(nn.Module):
    """A layer that sleeps in forward, and one whose collectives are slow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return self.layer(inputs)


def slowly_gathered() -> tuple[float, float]:
    """Seconds of forward and backward in the trace of a model whose collectives take a tenth of a second each."""
    model: Any = nn.Sequential(Slow(), Slow())
    split(model, (*model, model), "fsdp")
    for group in shard_groups(model):
        for name in ("all_gather", "reduce_scatter"):
            setattr(group, name, _Late(getattr(group, name)))
    recording = sync.trace_model(model, STEPS, warmup=WARMUP, compressors=[])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    while not recording.done:
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return recording.trace.forward_s, recording.trace.backward_s


class _Late:
    """A collective of FSDP that begins late."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.allocate = inner, inner.allocate

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.1)
        return self._inner(*arguments, **options)


def test_times_are_those_of_computing_alone():
    """Forward sleeps for 40 ms. Collectives sleep for 200 ms in forward, and for 400 ms in backward."""
    for forward_s, backward_s in values_of(run_ranks(2, slowly_gathered)):
        assert 0.04 <= forward_s < 0.2 and backward_s < 0.2


SCRIPT = """
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
for each in (*model, model):
    fully_shard(each, mesh=init_device_mesh(torch.get_default_device().type, (torch.distributed.get_world_size(),)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(9):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
raise RuntimeError("nobody has ended it")
"""


def of_script(path: str) -> str:
    begin = functools.partial(sync.trace_model, steps=2, warmup=1, compressors=[])
    return measured_in_script(path, [], begin, lambda recording: recording.trace).to_text()


def test_the_first_model_of_a_script_is_recorded(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    for text in values_of(run_ranks(2, of_script, str(path), fresh=True, exits=False)):
        trace = ModelTrace.from_text(text, "file")
        assert len(trace.buckets) == 2 and len(trace.gathers) == 4 and trace.model == "Sequential"


def test_traces_with_gathers_survive_their_file_and_wrong_ones_are_refused():
    trace = _small()
    assert ModelTrace.from_text(trace.to_text(), "file") == trace
    assert shards_of(trace, 4).tensors[0].shape == (2, 3) and shards_of(trace, 4).tensors[1].numel == 2
    assert "gathers" not in replace(trace, gathers=()).to_text()
    gather = trace.gathers[0]
    for wrong, problem in (
        (replace(gather, names=("b",)), "the names of a bucket"),
        (replace(gather, needed_s=0.5), "at least asked_s, 1.0 s"),
    ):
        with pytest.raises(TraceError, match=problem):
            replace(trace, gathers=(wrong,)).to_text()


def _small() -> ModelTrace:
    tensors = (TracedTensor("a", 15, 1.0, (5, 3)), TracedTensor("b", 7, 2.0, (7,), role=Role.VECTOR))
    return ModelTrace("m", tensors, 2.0, 1.0, buckets=(("a", "b"),), gathers=(TracedGather(("a", "b"), 1.0, 1.5),))
