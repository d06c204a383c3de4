"""States of torch.distributed.checkpoint that do not fit are refused on all ranks, and change nothing."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_jobs import SAVED, SETTINGS, Job, remembered
from ranks import run_ranks, values_of
from workloads import digest_of


def refused(folder: str) -> dict[str, str]:
    """Load states that do not fit and return the texts of the errors."""
    path, rank = f"{folder}/good", dist.get_rank()
    job = Job(SETTINGS[0])
    job.train(0, SAVED)
    dcp.save(job.parts(), checkpoint_id=path)
    dcp.save({"a": job.sync.checkpoint(), "b": job.sync.checkpoint()}, checkpoint_id=f"{folder}/two")
    dcp.save({"model": job.module.state_dict()}, checkpoint_id=f"{folder}/none")
    fresh = Job(SETTINGS[0], seed=1)
    texts: dict[str, str] = {}

    def attempt(name: str, parts: dict[str, Any], place: str = path, what: Job = fresh) -> None:
        before = what.sync.state_dict()
        with pytest.raises(BaseException) as raised:
            dcp.load(parts, checkpoint_id=place)
        texts[name] = str(raised.value)
        now = what.sync.state_dict()
        assert now["step"] == before["step"] and digest_of(remembered(now)) == digest_of(remembered(before))

    attempt("nothing said of what is read", fresh.parts())
    attempt("the wrong object", {"gckernels": fresh.sync})
    attempt("none", {"gckernels": fresh.sync.checkpoint(reads=f"{folder}/none")}, f"{folder}/none")
    attempt("several", {"a": fresh.sync.checkpoint(reads=f"{folder}/two")}, f"{folder}/two")
    attempt("another key", {"a": fresh.sync.checkpoint(reads=f"{folder}/two", key="c")}, f"{folder}/two")
    attempt("nowhere", {"gckernels": fresh.sync.checkpoint(reads=f"{folder}/nowhere")})
    for key in ("a", "b"):
        dcp.load({key: fresh.sync.checkpoint(reads=f"{folder}/two", key=key)}, checkpoint_id=f"{folder}/two")
        assert fresh.sync.state_dict()["step"] == SAVED
    other = Job(("BlockQuant", "alltoall", "hook"))
    attempt("another compressor", other.parts(reads=path), what=other)
    other.sync.close()
    other = Job(("EFSignSGD", "allgather", "hook"))
    attempt("another program, nothing said of what is read", other.parts(), what=other)
    dcp.load(other.parts(reads=path), checkpoint_id=path)
    assert other.sync.state_dict()["step"] == SAVED
    other.sync.close()
    # one rank reads inf, and both refuse
    checkpoint = fresh.sync.checkpoint(reads=path)
    state = checkpoint.state_dict()
    with pytest.raises(BaseException) as raised:
        dcp.save({"gckernels": checkpoint}, checkpoint_id=f"{folder}/early")
    texts["saved before it is loaded"] = str(raised.value)
    unread = copy.deepcopy(state)
    dcp.load({"gckernels": state}, checkpoint_id=path)
    header = json.loads(state["gckernels"])
    state["worker"]["layers.0.weight"].to_local()[0, 5] = torch.inf if rank == 1 else 0.0
    damages = {
        "inf": state,
        "not read": unread | {"gckernels": state["gckernels"]},
        "no header": state | {"gckernels": None},
        "a header of another version": state | {"gckernels": json.dumps(header | {"version": 2})},
        "a header without a step": state | {"gckernels": json.dumps({k: v for k, v in header.items() if k != "step"})},
        "a kind less": {name: each for name, each in state.items() if name != "shard"},
        "no tensor": state | {"worker": dict.fromkeys(state["worker"], 0.0)},
        "another header on each rank": state | {"gckernels": json.dumps(header | {"step": rank})},
    }
    for name, damaged in damages.items():
        if name != "inf":
            state["worker"]["layers.0.weight"].to_local()[0, 5] = 0.0
        before = digest_of(remembered(fresh.sync.state_dict()))
        with pytest.raises((ValueError, RuntimeError)) as damage:
            fresh.sync.checkpoint().load_state_dict(damaged)
        texts[name] = str(damage.value)
        assert digest_of(remembered(fresh.sync.state_dict())) == before
    # a loaded state can be saved again
    checkpoint.load_state_dict(state)
    dcp.save({"gckernels": checkpoint}, checkpoint_id=f"{folder}/later")
    for wrong in ({"reads": 3}, {"reads": path, "key": 3}):
        with pytest.raises(TypeError):
            fresh.sync.checkpoint(**wrong)  # type: ignore[arg-type]
    for each in (job, fresh):
        each.sync.close()
    return texts


def test_what_does_not_fit_is_refused_on_all_ranks(tmp_path):
    found = values_of(run_ranks(2, refused, str(tmp_path)))
    not_read = "pass the checkpoint's path: checkpoint(reads=path)"
    for name, output in {
        "nothing said of what is read": not_read,
        "the wrong object": "Missing key in checkpoint state_dict: gckernels.note",
        "none": "nothing was saved by gckernels in this checkpoint",
        "several": "gckernels has saved under 'a', 'b'; pass one of these as key",
        "another key": "nothing was saved by gckernels under key='c', only under 'a', 'b'",
        "nowhere": "No such file",
        "another compressor": "compressor in the saved plan: EFSignSGD, in the current one: BlockQuant",
        "another program, nothing said of what is read": not_read,
        "saved before it is loaded": "what checkpoint() was given to read has not been loaded yet",
        "inf": "the worker residual of layers.0.weight holds inf or NaN",
        "not read": "the worker residual of layers.0.weight holds inf or NaN",
        "no header": "must be JSON of format 'gckernels.checkpoint'",
        "a header of another version": "version 1",
        "a header without a step": "step missing",
        "a kind less": "the saved shard residual of layers.0.weight has not been loaded",
        "no tensor": "the saved worker residual of layers.0.weight has not been loaded",
        "another header on each rank": "the ranks do not have the same settings",
    }.items():
        for rank, texts in enumerate(found):
            assert output in texts[name], f"rank {rank}, {name}"
