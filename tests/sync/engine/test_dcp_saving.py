"""Every way in which torch.distributed.checkpoint saves: training goes on meanwhile, and wrong objects are refused."""

from __future__ import annotations

import copy
import io
import multiprocessing.resource_sharer
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from dcp_jobs import SAVED, SETTINGS, STEPS, Job, remembered
from gckernels.sync import Attachment
from ranks import run_ranks, values_of
from workloads import digest_of


def _save(front: str, parts: dict[str, Any], path: str, group: dist.ProcessGroup | None = None) -> Any:
    """Save in one of several ways; return a future, or None if the save is complete."""
    more: dict[str, Any] = {"checkpoint_id": path, "process_group": group}
    if front == "save":
        dcp.save(parts, **more)
        return None
    if front == "async with a writer":
        more |= {"checkpoint_id": None, "storage_writer": dcp.FileSystemWriter(path)}
    if front == "async in a process":
        more |= {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    return dcp.async_save(parts, **more)


def saved_in_ways(folder: str, *ways: str) -> None:
    """In every way: save while training goes on, load the result, and check that DCP refuses to save wrong objects."""
    others = dist.new_group()  # a thread that saves must not share a group with the training
    for front in ways:
        path = f"{folder}/{front}"
        job = Job(SETTINGS[0])
        job.train(0, SAVED)
        before = digest_of(remembered(job.sync.state_dict()))
        future = _save(front, {"gckernels": job.sync.checkpoint()}, path, others)
        job.train(SAVED, STEPS)
        if future is not None:
            future.result()
        again = Job(SETTINGS[0], seed=1)
        dcp.load({"gckernels": again.sync.checkpoint(reads=path)}, checkpoint_id=path)
        state = again.sync.state_dict()
        assert digest_of(remembered(state)) == before and state["step"] == SAVED, front
        again.sync.close()
        _check_refusals(front, job.sync, others, f"{path}, wrong")
        job.sync.close()


class _App:
    """An application object that collects all states itself, the form in which many scripts pass them to DCP."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment

    def state_dict(self) -> dict[str, Any]:
        return {"step": 3, "deeper": [self._attachment.state_dict()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("nothing was saved")


def _check_refusals(front: str, attachment: Attachment, group: dist.ProcessGroup, path: str) -> None:
    """Assert that the state of one rank is refused at saving, on every rank, however DCP receives it."""
    state = attachment.state_dict()
    for wrong in (attachment, state, _App(attachment), copy.deepcopy(state)):
        with pytest.raises(BaseException) as raised:  # CheckpointException is not a subclass of Exception
            future = _save(front, {"gckernels": wrong}, path, group)
            if future is not None:
                future.result()
        assert "this state is of one rank; torch.distributed.checkpoint takes what checkpoint() returns" in str(
            raised.value
        )
        assert not Path(path, ".metadata").exists()
    if front == "save":  # objects deeper in the dict, whose state DCP does not ask for
        for deeper in (attachment, attachment.checkpoint()):
            with pytest.raises(BaseException) as raised:
                _save(front, {"all": {"gckernels": deeper}}, path, group)
            assert "what checkpoint() returns must be a value of the dict that is given to torch" in str(raised.value)
    file = io.BytesIO()
    torch.save(state, file)  # the usual way to save
    file.seek(0)
    attachment.load_state_dict(torch.load(file, weights_only=True))
    assert digest_of(remembered(attachment.state_dict())) == digest_of(remembered(state))


@pytest.mark.host_only("the simulated device's groups have one backend for both devices")
def test_saved_in_any_way_while_training_goes_on(tmp_path):
    values_of(run_ranks(2, saved_in_ways, str(tmp_path), "save", "async", "async with a writer"))


def saved_by_another_process(folder: str) -> None:
    try:
        saved_in_ways(folder, "async in a process")
    finally:
        multiprocessing.resource_sharer.stop()  # the thread that passes tensors to the process


@pytest.mark.host_only("the simulated device's groups have one backend for both devices")
@pytest.mark.slow
def test_saved_by_another_process(tmp_path):
    values_of(run_ranks(2, saved_by_another_process, str(tmp_path), fresh=True, exits=False))
