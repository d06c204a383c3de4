"""Checkpoints of torch.distributed.checkpoint are saved by all ranks together and loaded by any number of ranks."""

from __future__ import annotations

import copy
import io
import json
import multiprocessing.resource_sharer
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.nn.parallel import DistributedDataParallel

from gckernels import sync
from gckernels.sync import PROGRAMS, Attachment, Synchronizer, attach, ring
from gckernels.sync.programs.residuals import ENCODINGS
from gckernels.sync.resources.feedback import KINDS
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from workloads import digest_of, mass_of, thinned, topology

SAVED, STEPS = 4, 8

Setting = tuple[str, str, str]
"""The compressor, the program, and the front end."""

SETTINGS: tuple[Setting, ...] = (
    ("EFSignSGD", "alltoall", "hook"),  # shards are multiples of 16 elements, so some ranks have none
    ("BlockQuant(bits=4)", "default", "synchronizer"),  # two ranks have another program than more
    ("TopK(ratio=0.05)", "parameter_server", "hook"),
    ("BlockQuant(bits=4)", "ring", "synchronizer"),
    ("EFSignSGD", "hierarchical", "hook"),
    ("DGC", "default", "synchronizer"),
    ("PowerSGD(rank=2)", "default", "hook"),
    ("PowerSGD(rank=2, one_sided=True)", "default", "synchronizer"),
    ("Cast16", "default", "hook"),  # has no residual
)


class _Job:
    """A model in training, with its attachment or synchronizer."""

    def __init__(self, setting: Setting, seed: int = 0, group: dist.ProcessGroup | None = None, **more: Any) -> None:
        compressor, program, front = setting
        ranks = dist.get_world_size(group)
        programs = {"default": None, "ring": ring(ranks) if ranks > 1 else None} | PROGRAMS
        more = {"seed": 7} | more
        self.module = build("Mlp", seed=seed)
        self.model: torch.nn.Module = self.module
        self.sync: Attachment | Synchronizer
        plan = sync.plan(self.module, compressor, program=programs[program], topology=topology(ranks))
        if front == "hook":
            self.model = DistributedDataParallel(self.module, process_group=group, bucket_cap_mb=SMALL_BUCKETS)
            self.sync = attach(self.model, plan, **more)
        else:
            more |= {"process_group": group, "bucket_cap_mb": SMALL_BUCKETS}
            self.sync = Synchronizer(self.module, plan, **more)

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.module.zero_grad()
            self.model(self.module.batch(step, dist.get_rank())).backward()
            with torch.no_grad():
                for parameter in self.module.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(0.02 * parameter.grad)

    def parts(self, **arguments: Any) -> dict[str, Any]:
        return {"model": self.module.state_dict(), "gckernels": self.sync.checkpoint(**arguments)}

    def load(self, path: str, **arguments: Any) -> None:
        dcp.load(self.parts(reads=path), checkpoint_id=path, **arguments)

    def digest(self) -> str:
        return digest_of([*self.module.parameters(), *_remembered(self.sync.state_dict())])


def _remembered(state: dict[str, Any]) -> list[torch.Tensor]:
    return [tensor for kind in KINDS for _, tensor in sorted(_filled(state["feedback"][kind]).items())]


def _filled(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All tensors with elements. A rank without a part of a shard, or that is no root, may have no tensor or an empty
    one."""
    return {name: tensor for name, tensor in tensors.items() if tensor.numel()}


def _other(setting: Setting) -> Setting:
    """The same setting with the other front end."""
    return (*setting[:2], "hook" if setting[2] == "synchronizer" else "synchronizer")


# -------------------------------------------------------------------- any number of ranks


def saved(folder: str) -> list[str]:
    """For every setting: train, save and train on; return the digests of the results."""
    digests = []
    for index, setting in enumerate(SETTINGS):
        job = _Job(setting)
        job.train(0, SAVED)
        dcp.save(job.parts(), checkpoint_id=f"{folder}/{index}")
        mass = mass_of(job.sync)
        torch.save({"own": job.sync.state_dict(), "mass": mass}, f"{folder}/{index}-{dist.get_rank()}.pt")
        job.train(SAVED, STEPS)
        digests.append(job.digest())
        job.sync.close()
    return digests


def gone_on(folder: str, ranks_before: int) -> list[str]:
    """Load into new jobs with the other front end, train on, and return the digests of the results."""
    digests = []
    for index, setting in enumerate(SETTINGS):
        files = [torch.load(f"{folder}/{index}-{rank}.pt", weights_only=True) for rank in range(ranks_before)]
        job, listed = _Job(_other(setting), seed=1), _Job(_other(setting), seed=1)
        _check_share(job.sync.checkpoint(reads=f"{folder}/{index}").state_dict(), ranks_before)
        if dist.get_world_size() > 1 or not any(map(len, files[0]["own"]["feedback"].values())):
            job.load(f"{folder}/{index}")
        else:
            with pytest.warns(UserWarning, match=f"those of the {ranks_before} ranks of the saved job are dropped"):
                job.load(f"{folder}/{index}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            listed.sync.load_state_dict([file["own"] for file in files])
        state, expected = job.sync.state_dict(), listed.sync.state_dict()
        assert state["step"] == SAVED and state["units"] == expected["units"]
        for kind in KINDS:
            found, wanted = (_filled(each["feedback"][kind]) for each in (state, expected))
            assert found.keys() == wanted.keys()
            for name, tensor in found.items():
                assert torch.equal(tensor, wanted[name]), f"{setting}: {kind} of {name}"
        if dist.get_world_size() > 1:
            mass = mass_of(job.sync)
            assert any(each.any() for each in mass.values()) == any(state["feedback"]["worker"])
            for key, before in files[0]["mass"].items():
                atol = 2.0**-22 * max(1.0, *before.abs().flatten())
                torch.testing.assert_close(mass[key], before, rtol=0, atol=atol)
        listed.sync.close()
        job.train(SAVED, STEPS)
        digests.append(job.digest())
        job.sync.close()
    return digests


def _check_share(targets: dict[str, Any], ranks_before: int) -> None:
    """Assert that a rank reads either its own residuals or its part of the columns of all ranks' residuals."""
    for kind in ENCODINGS:
        for rows in targets.get(kind, {}).values():
            ranks, width = rows.shape
            assert ranks == ranks_before
            assert rows.to_local().numel() in (width, *(ranks * part.numel() for part in _parts(width)))


def _parts(width: int) -> tuple[torch.Tensor, ...]:
    return (*torch.empty(width).chunk(dist.get_world_size()), torch.empty(0))


def test_an_equally_large_job_goes_on_with_the_same_bits(tmp_path):
    undisturbed = values_of(run_ranks(2, saved, str(tmp_path)))
    assert values_of(run_ranks(2, gone_on, str(tmp_path), 2)) == undisturbed


@pytest.mark.parametrize(("old", "new"), thinned([(1, 2), (3, 1), (2, 3), (4, 2)], 4))
def test_what_was_not_sent_yet_is_kept_by_any_number_of_ranks(old, new, tmp_path):
    values_of(run_ranks(old, saved, str(tmp_path)))
    values_of(run_ranks(new, gone_on, str(tmp_path), old))


# -------------------------------------------------------------------- ways to save


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
        job = _Job(SETTINGS[0])
        job.train(0, SAVED)
        before = digest_of(_remembered(job.sync.state_dict()))
        future = _save(front, {"gckernels": job.sync.checkpoint()}, path, others)
        job.train(SAVED, STEPS)
        if future is not None:
            future.result()
        again = _Job(SETTINGS[0], seed=1)
        dcp.load({"gckernels": again.sync.checkpoint(reads=path)}, checkpoint_id=path)
        state = again.sync.state_dict()
        assert digest_of(_remembered(state)) == before and state["step"] == SAVED, front
        again.sync.close()
        _check_refusals(front, job.sync, others, f"{path}, wrong")
        job.sync.close()


class _App:
    """An application object that collects all states itself, the form in which many scripts pass them to DCP."""

    def __init__(self, attachment: Attachment | Synchronizer) -> None:
        self._attachment = attachment

    def state_dict(self) -> dict[str, Any]:
        return {"step": 3, "deeper": [self._attachment.state_dict()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("nothing was saved")


def _check_refusals(front: str, attachment: Attachment | Synchronizer, group: dist.ProcessGroup, path: str) -> None:
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
    assert digest_of(_remembered(attachment.state_dict())) == digest_of(_remembered(state))


def test_saved_in_any_way_while_training_goes_on(tmp_path):
    values_of(run_ranks(2, saved_in_ways, str(tmp_path), "save", "async", "async with a writer"))


# -------------------------------------------------------------------- states that do not fit


def refused(folder: str) -> dict[str, str]:
    """Load states that do not fit and return the texts of the errors."""
    path, rank = f"{folder}/good", dist.get_rank()
    job = _Job(SETTINGS[0])
    job.train(0, SAVED)
    dcp.save(job.parts(), checkpoint_id=path)
    dcp.save({"a": job.sync.checkpoint(), "b": job.sync.checkpoint()}, checkpoint_id=f"{folder}/two")
    dcp.save({"model": job.module.state_dict()}, checkpoint_id=f"{folder}/none")
    fresh = _Job(SETTINGS[0], seed=1)
    texts: dict[str, str] = {}

    def attempt(name: str, parts: dict[str, Any], place: str = path, what: _Job = fresh) -> None:
        before = what.sync.state_dict()
        with pytest.raises(BaseException) as raised:
            dcp.load(parts, checkpoint_id=place)
        texts[name] = str(raised.value)
        now = what.sync.state_dict()
        assert now["step"] == before["step"] and digest_of(_remembered(now)) == digest_of(_remembered(before))

    attempt("nothing said of what is read", fresh.parts())
    attempt("the wrong object", {"gckernels": fresh.sync})
    attempt("none", {"gckernels": fresh.sync.checkpoint(reads=f"{folder}/none")}, f"{folder}/none")
    attempt("several", {"a": fresh.sync.checkpoint(reads=f"{folder}/two")}, f"{folder}/two")
    attempt("another key", {"a": fresh.sync.checkpoint(reads=f"{folder}/two", key="c")}, f"{folder}/two")
    attempt("nowhere", {"gckernels": fresh.sync.checkpoint(reads=f"{folder}/nowhere")})
    for key in ("a", "b"):
        dcp.load({key: fresh.sync.checkpoint(reads=f"{folder}/two", key=key)}, checkpoint_id=f"{folder}/two")
        assert fresh.sync.state_dict()["step"] == SAVED
    other = _Job(("BlockQuant", "alltoall", "hook"))
    attempt("another compressor", other.parts(reads=path), what=other)
    other.sync.close()
    other = _Job(("EFSignSGD", "allgather", "hook"))
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
        before = digest_of(_remembered(fresh.sync.state_dict()))
        with pytest.raises((ValueError, RuntimeError)) as damage:
            fresh.sync.checkpoint().load_state_dict(damaged)
        texts[name] = str(damage.value)
        assert digest_of(_remembered(fresh.sync.state_dict())) == before
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


# -------------------------------------------------------------------- subgroups, frozen parameters, late starts


def in_parts(folder: str) -> None:
    """Save and load with three ranks, two of which synchronise in a group of their own, with a frozen parameter, and in
    a job that does not compress yet."""
    group = dist.new_group([1, 2])
    if dist.get_rank() > 0:
        job = _Job(SETTINGS[0], group=group)
        job.train(0, SAVED)
        dcp.save(job.parts(), checkpoint_id=f"{folder}/group", process_group=group)
        again = _Job(SETTINGS[0], seed=1, group=group)
        again.load(f"{folder}/group", process_group=group)  # only this group has saved
        assert digest_of(_remembered(again.sync.state_dict())) == digest_of(_remembered(job.sync.state_dict()))
        job.sync.close()
        again.sync.close()
    dist.barrier()

    frozen = _Job(("EFSignSGD", "default", "synchronizer"), bucket_cap_mb=1e-6)
    frozen.module.layers[0].weight.requires_grad_(False)
    frozen.train(0, SAVED)
    early = _Job(("EFSignSGD", "default", "synchronizer"), start_step=100)
    early.train(0, 2)
    for name, job in (("frozen", frozen), ("early", early)):
        dcp.save(job.parts(), checkpoint_id=f"{folder}/{name}")
        again = _Job(("EFSignSGD", "default", "hook"), seed=1)
        again.load(f"{folder}/{name}")
        state, expected = again.sync.state_dict(), job.sync.state_dict()
        assert state["step"] == expected["step"] and state["units"] == expected["units"]
        assert digest_of(_remembered(state)) == digest_of(_remembered(expected))
        assert bool(state["units"]) == (name == "frozen") and "layers.0.weight" not in state["units"]
        again.sync.close()
        job.sync.close()


def in_groups(path: str) -> None:
    """Two groups of two ranks save concurrently under the same key, and each loads its own state; all ranks together
    cannot load it."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    job = _Job(SETTINGS[0], group=groups[dist.get_rank() // 2])
    job.train(0, SAVED)
    dcp.save({"gckernels": job.sync.checkpoint()}, checkpoint_id=path)
    again = _Job(SETTINGS[0], seed=1, group=groups[dist.get_rank() // 2])
    dcp.load({"gckernels": again.sync.checkpoint(reads=path)}, checkpoint_id=path)
    assert digest_of(_remembered(again.sync.state_dict())) == digest_of(_remembered(job.sync.state_dict()))
    together = _Job(SETTINGS[0], seed=1)
    with pytest.raises(ValueError, match="group_of_rank_0, group_of_rank_2, but to be loaded by all ranks"):
        dcp.load({"gckernels": together.sync.checkpoint(reads=path)}, checkpoint_id=path)
    for each in (job, again, together):
        each.sync.close()


def test_groups_that_synchronise_by_themselves(tmp_path):
    values_of(run_ranks(4, in_groups, str(tmp_path)))


def test_parts_of_ranks_and_units(tmp_path):
    values_of(run_ranks(3, in_parts, str(tmp_path)))


# -------------------------------------------------------------------- another process


def saved_by_another_process(folder: str) -> None:
    try:
        saved_in_ways(folder, "async in a process")
    finally:
        multiprocessing.resource_sharer.stop()  # the thread that passes tensors to the process


@pytest.mark.slow
def test_saved_by_another_process(tmp_path):
    values_of(run_ranks(2, saved_by_another_process, str(tmp_path), fresh=True, exits=False))
