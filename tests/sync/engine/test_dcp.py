"""Checkpoints of torch.distributed.checkpoint are saved by all ranks together and loaded by any number of ranks."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dcp_jobs import SAVED, SETTINGS, STEPS, Job, Setting, filled, remembered
from gckernels.sync.programs.residuals import ENCODINGS
from gckernels.sync.resources.feedback import KINDS
from ranks import run_ranks, values_of
from workloads import digest_of, mass_of, thinned


def _other(setting: Setting) -> Setting:
    """The same setting with the other front end."""
    return (*setting[:2], "hook" if setting[2] == "module" else "module")


# -------------------------------------------------------------------- any number of ranks


def saved(folder: str) -> list[str]:
    """For every setting: train, save and train on; return the digests of the results."""
    digests = []
    for index, setting in enumerate(SETTINGS):
        job = Job(setting)
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
        job, listed = Job(_other(setting), seed=1), Job(_other(setting), seed=1)
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
            found, wanted = (filled(each["feedback"][kind]) for each in (state, expected))
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


# -------------------------------------------------------------------- subgroups, frozen parameters, late starts


def in_parts(folder: str) -> None:
    """Save and load with three ranks, two of which synchronise in a group of their own, with a frozen parameter, and in
    a job that does not compress yet."""
    group = dist.new_group([1, 2])
    if dist.get_rank() > 0:
        job = Job(SETTINGS[0], group=group)
        job.train(0, SAVED)
        dcp.save(job.parts(), checkpoint_id=f"{folder}/group", process_group=group)
        again = Job(SETTINGS[0], seed=1, group=group)
        again.load(f"{folder}/group", process_group=group)  # only this group has saved
        assert digest_of(remembered(again.sync.state_dict())) == digest_of(remembered(job.sync.state_dict()))
        job.sync.close()
        again.sync.close()
    dist.barrier()

    frozen = Job(("EFSignSGD", "default", "module"), bucket_cap_mb=1e-6)
    frozen.module.layers[0].weight.requires_grad_(False)
    frozen.train(0, SAVED)
    early = Job(("EFSignSGD", "default", "module"), start_step=100)
    early.train(0, 2)
    for name, job in (("frozen", frozen), ("early", early)):
        dcp.save(job.parts(), checkpoint_id=f"{folder}/{name}")
        again = Job(("EFSignSGD", "default", "hook"), seed=1)
        again.load(f"{folder}/{name}")
        state, expected = again.sync.state_dict(), job.sync.state_dict()
        assert state["step"] == expected["step"] and state["units"] == expected["units"]
        assert digest_of(remembered(state)) == digest_of(remembered(expected))
        assert bool(state["units"]) == (name == "frozen") and "layers.0.weight" not in state["units"]
        again.sync.close()
        job.sync.close()


def in_groups(path: str) -> None:
    """Two groups of two ranks save concurrently under the same key, and each loads its own state; all ranks together
    cannot load it."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    job = Job(SETTINGS[0], group=groups[dist.get_rank() // 2])
    job.train(0, SAVED)
    dcp.save({"gckernels": job.sync.checkpoint()}, checkpoint_id=path)
    again = Job(SETTINGS[0], seed=1, group=groups[dist.get_rank() // 2])
    dcp.load({"gckernels": again.sync.checkpoint(reads=path)}, checkpoint_id=path)
    assert digest_of(remembered(again.sync.state_dict())) == digest_of(remembered(job.sync.state_dict()))
    together = Job(SETTINGS[0], seed=1)
    with pytest.raises(ValueError, match="group_of_rank_0, group_of_rank_2, but to be loaded by all ranks"):
        dcp.load({"gckernels": together.sync.checkpoint(reads=path)}, checkpoint_id=path)
    for each in (job, again, together):
        each.sync.close()


def test_groups_that_synchronise_by_themselves(tmp_path):
    values_of(run_ranks(4, in_groups, str(tmp_path)))


def test_parts_of_ranks_and_units(tmp_path):
    values_of(run_ranks(3, in_parts, str(tmp_path)))
