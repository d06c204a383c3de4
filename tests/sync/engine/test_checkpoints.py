"""A job that resumes from a state goes on with the same bits; a state that does not fit is refused and changes
nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gckernels
from gckernels import BlockQuant, EFSignSGD, sync
from gckernels.sync import Attachment, attach
from gckernels.sync.programs import PROGRAMS
from gckernels.sync.resources.feedback import KINDS
from gckernels.sync.stats.history import Journal
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from workloads import combinations, digest_of, thinned, topology

SAVED, STEPS = 4, 8


ONE_BUCKET = 25.0  # MiB, enough for every model here

Setting = tuple[str, str, str, float]
"""The compressor, the program, the model, and the bucket size in MiB."""


def saved_and_gone_on(settings: list[Setting], folder: str) -> list[str]:
    """Train once for every setting, saving along the way, and return the digests of the results."""
    return [_span(setting, 0, _file(folder, index)) for index, setting in enumerate(settings)]


def resumed(settings: list[Setting], folder: str) -> list[str]:
    return [_span(setting, SAVED, _file(folder, index)) for index, setting in enumerate(settings)]


def _file(folder: str, index: int) -> Path:
    return Path(folder, f"{index}-rank{dist.get_rank()}.pt")


def _span(setting: Setting, first: int, file: Path) -> str:
    compressor, program, model, bucket_cap_mb = setting
    state = torch.load(file, weights_only=True) if first else None
    module = build(model, seed=first)  # the parameters differ from those in the file
    if state is not None:
        module.load_state_dict(state["model"])
    hooked = DistributedDataParallel(module, bucket_cap_mb=bucket_cap_mb)
    optimizer = torch.optim.SGD(hooked.parameters(), lr=0.05, momentum=0.9)
    where = topology(dist.get_world_size())
    attachment = attach(
        hooked,
        sync.uniform_plan(hooked, gckernels.from_spec(compressor), program=PROGRAMS[program], topology=where),
        seed=7,
    )
    if state is not None:
        optimizer.load_state_dict(state["optimizer"])
        attachment.load_state_dict(state["attachment"])
    for step in range(first, STEPS):
        if step == SAVED and state is None:
            parts = {"model": module, "optimizer": optimizer, "attachment": attachment}
            torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        optimizer.zero_grad()
        hooked(module.batch(step, dist.get_rank())).backward()
        optimizer.step()
    found = attachment.state_dict()
    residuals = [residual for kind in found["feedback"].values() for _, residual in sorted(kind.items())]
    attachment.close()
    # DDP itself averages what a plan leaves alone, and nobody counts its steps
    assert found["step"] == (0 if all(unit.in_place for unit in attachment.plan.units) else STEPS)
    return digest_of(module.parameters()) + digest_of(residuals)


@pytest.mark.parametrize(("world_size", "every"), thinned([(2, 12), (3, 6), (2, 1), (3, 3)], 4))
def test_a_resumed_job_goes_on_with_the_same_bits(world_size, every, tmp_path):
    # With more than two ranks the order of addition in an allreduce depends on an element's place in the buffer. In the
    # first step of a process DDP has all gradients in one bucket, so a resumed job has them in another place. Gathered
    # payloads are always added in the order of the ranks.
    pairs = combinations() if world_size == 2 else combinations("allgather", "alltoall")
    settings = [(*pair, "Zoo", SMALL_BUCKETS) for pair in pairs[::every]]
    # After the first step DDP rebuilds its bucket, here with the same parameters, in the same order and in another one.
    settings += [("EFSignSGD", "alltoall", model, ONE_BUCKET) for model in ("Backwards", "Zoo")]
    gone_on = values_of(run_ranks(world_size, saved_and_gone_on, settings, str(tmp_path)))
    again = values_of(run_ranks(world_size, resumed, settings, str(tmp_path), fresh=True, exits=False))
    for index, setting in enumerate(settings):
        for rank in range(world_size):
            assert again[rank][index] == gone_on[rank][index], f"rank {rank}, {setting}"


# -------------------------------------------------------------------- states that do not fit


def refusals() -> list[str]:
    """Load states that do not fit and return the texts of the errors."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = build("Mlp")
    hooked = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    attachment = attach(hooked, sync.uniform_plan(hooked, BlockQuant(), program=PROGRAMS["alltoall"]))
    for step in range(3):
        hooked(module.batch(step, rank)).backward()
    good = attachment.state_dict()
    assert good["step"] == 3 and good["feedback"]["worker"]["layers.0.weight"].any()
    texts = []
    for bad in _bad_states(good, rank, world_size):
        try:
            attachment.load_state_dict(bad)
            texts.append("nothing was raised")
        except ValueError as error:
            texts.append(str(error))
        _assert_same(attachment, good)
    strided = {name: torch.stack([each, -each], dim=1)[:, 0] for name, each in good["feedback"]["worker"].items()}
    attachment.load_state_dict(good | {"feedback": good["feedback"] | {"worker": strided}})
    _assert_same(attachment, good)
    attachment.close()
    fresh = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    unused = attach(fresh, sync.uniform_plan(fresh, BlockQuant(), program=PROGRAMS["alltoall"]))
    for bad in _bad_states(good, rank, world_size):  # before any step no residual exists to compare with
        with pytest.raises(ValueError):
            unused.load_state_dict(bad)
        assert unused.state_dict() == {
            "note": good["note"],
            "step": 0,
            "rank": rank,
            "world_size": world_size,
            "plan": unused.plan.to_json(),
            "units": [],
            "feedback": {kind: {} for kind in KINDS},
            "journal": Journal().to_text(),
        }
    unused.load_state_dict(good)
    fresh(module.batch(0, rank)).backward()
    unused.close()
    return texts


def _bad_states(good: dict[str, Any], rank: int, world_size: int) -> list[Any]:
    def feedback(kind: str, residuals: Any) -> dict[str, Any]:
        return good | {"feedback": good["feedback"] | {kind: residuals}}

    worker, shard = good["feedback"]["worker"], good["feedback"]["shard"]
    name = "layers.0.weight"
    changed = good["plan"]["units"][0] | {"compressor": EFSignSGD().to_json()}
    assert changed["parameter"] == name
    return [
        good | {"rank": (rank + 1) % world_size},
        good | {"world_size": world_size + 1},
        {key: good[key] for key in ("step", "rank", "world_size", "plan", "units")},
        {},
        good | {"plan": None},
        good | {"plan": good["plan"] | {"version": 0}},
        good | {"plan": good["plan"] | {"topology": {"machines": world_size, "devices": 2}}},
        good | {"plan": good["plan"] | {"units": good["plan"]["units"][1:]}},
        good | {"plan": good["plan"] | {"units": [changed, *good["plan"]["units"][1:]]}},
        feedback("worker", {key: worker[key] for key in worker if key != name}),
        good | {"units": [key for key in good["units"] if key != name]},
        good | {"units": None},
        feedback("worker", worker | {name: torch.full_like(worker[name], torch.nan)}),
        feedback("shard", shard | {name: torch.full_like(shard[name], torch.inf)}),
        feedback("worker", worker | {name: worker[name].to("meta")}),
        feedback("worker", worker | {name: worker[name].to_sparse()}),
        feedback("worker", worker | {"layers.9.weight": torch.zeros(3)}),
        feedback("shard", shard | {"layers.0.bias": torch.zeros(67)}),  # a parameter sent exactly has no residual
        feedback("worker", worker | {name: torch.zeros(5)}),
        feedback("shard", shard | {name: torch.zeros(5)}),
        feedback("worker", worker | {name: worker[name].double()}),
        feedback("worker", worker | {name: [0.0]}),
        feedback("worker", None),
        good | {"feedback": {"worker": worker}},
        good | {"feedback": None},
        good | {"feedback": good["feedback"] | {"boss": {}}},
        good | {"step": "3"},
        good | {"step": 10**30},
        None,
    ]


def _assert_same(attachment: Attachment, good: dict[str, Any]) -> None:
    now = attachment.state_dict()
    assert all(now[key] == good[key] for key in ("step", "rank", "world_size", "plan"))
    for kind, residuals in good["feedback"].items():
        assert now["feedback"][kind].keys() == residuals.keys()
        assert all(torch.equal(now["feedback"][kind][name], residual) for name, residual in residuals.items())


@pytest.mark.host_only("the simulated device has no sparse tensors")
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing():
    for rank, texts in enumerate(values_of(run_ranks(2, refusals))):
        for text, output in zip(
            texts,
            [
                f"saved by rank {1 - rank} of 2, but this is rank {rank} of 2",
                f"saved by rank {rank} of 3, but this is rank {rank} of 2; pass the list of the states",
                "feedback missing",
                "step, world_size, plan, units missing",
                "plan must be a dict, got NoneType",
                "version must be an integer from 1 to 2, got 0; save it again",
                "the plan is for Topology(machines=2, devices=2), but the job had 2 ranks",
                "the plan keeps no worker residual of layers.0.weight, but the state has one",
                "layers.0.weight: compressor in the saved plan: EFSignSGD, in the current one: BlockQuant",
                "worker residual of layers.0.weight is missing",
                "worker residual of layers.0.weight, which is not in the state's list of units",
                "units must be a list of names",
                "worker residual of layers.0.weight holds inf or NaN",
                "shard residual of layers.0.weight holds inf or NaN",
                "must be a float32 vector, got Tensor of torch.float32 (1541,) on meta",
                "must be a float32 vector",
                "worker residual of layers.9.weight",
                "shard residual of layers.0.bias",
                "worker residual of layers.0.weight has 5 elements",
                "shard residual of layers.0.weight has 5 elements",
                "worker residual of layers.0.weight",
                "worker residual of layers.0.weight",
                "'worker'",
                "'shard'",
                "feedback",
                "boss",
                "step must be an int",
                f"step must be an int from 0 to {2**48}",
                "state",
            ],
            strict=True,
        ):
            assert output in text


def of_another_compressor(names: list[tuple[str, str]]) -> list[str]:
    """Save with one compressor and load with another, both one state and a list of states; return the texts of the
    errors."""
    texts = []
    for saved, loaded in names:
        found = []
        for number, name in enumerate((saved, loaded)):
            module = build("Mlp")
            hooked = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
            attachment = attach(
                hooked, sync.uniform_plan(hooked, gckernels.from_spec(name), program=PROGRAMS["allgather"])
            )
            if number == 0:
                for step in range(3):
                    hooked(module.batch(step, dist.get_rank())).backward()
            found.append(attachment)
        state, before = found[0].state_dict(), found[1].state_dict()
        states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(states, state)
        for given in (state, states):
            with pytest.raises(ValueError) as raised:
                found[1].load_state_dict(given)
            texts.append(str(raised.value))
            assert found[1].state_dict() == before
        for attachment in found:
            attachment.close()
    return texts


def test_the_state_of_another_compressor_is_refused():
    names = [("SigNUM", "BlockQuant"), ("EFSignSGD", "TopK"), ("EFSignSGD", "DGC")]
    for texts in values_of(run_ranks(2, of_another_compressor, names)):
        for (saved, loaded), one, several in zip(names, texts[::2], texts[1::2], strict=True):
            assert f"compressor in the saved plan: {saved}, in the current one: {loaded}" in one
            assert one == several


# -------------------------------------------------------------------- bytes


def sizes() -> dict[str, Any]:
    """Residuals and bytes on the wire of two layers, ``[100, 64]`` and ``[10, 100]``, with biases."""
    found: dict[str, Any] = {}
    for name, compressor, program in (
        ("allgather", BlockQuant(), "allgather"),
        ("alltoall", BlockQuant(), "alltoall"),
        ("dense", BlockQuant(), "allreduce"),
        ("signs", EFSignSGD(), "allgather"),
        ("cast", gckernels.Cast16(), "encoded_allreduce"),
    ):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(64, 100), torch.nn.Linear(100, 10))
        hooked = DistributedDataParallel(module, bucket_cap_mb=0.001)
        attachment = attach(
            hooked,
            sync.uniform_plan(hooked, compressor, program=PROGRAMS[program], topology=topology(dist.get_world_size())),
        )
        sent = []
        for _ in range(4):
            hooked(torch.randn(3, 64)).sum().backward()
            sent.append(attachment.sent_nbytes_per_step())
        assert len(attachment._frontend._buckets) == (
            0 if program == "allreduce" else 2
        )  # a plan that leaves them to DDP
        found[name] = (*sent, attachment.residual_nbytes())
        attachment.close()
        assert attachment.sent_nbytes_per_step() == sent[-1]
    return found


# BlockQuant, 6400 elements: 16 + 25 scales (100 -> 112) + 6400 codes = 6528; 1000 elements: 16 + 16 + 1008 = 1040.
# Halves of 3200 and 512: 16 + 13 scales (52 -> 64) + 3200 = 3280; 16 + 2 scales (8 -> 16) + 512 = 544. EFSignSGD: 16 +
# 50 scales (200 -> 208) + 800 = 1024; 16 + 8 scales (32) + 125 (-> 128) = 176. Identity, 100 elements: 400, halves of
# 64: 256; 10 elements: 48 (40), halves of 16: 64. Cast16: 12800; 2000; 208 (200); 32 (20). All programs but
# alltoall send single payloads to one other rank; an allreduce between two ranks sends as much as it reduces.
EXPECTED_OF_2 = {
    "allgather": (6528 + 1040 + 400 + 48, 4 * (6400 + 1000)),
    # one half goes to the other rank and one comes back; worker residuals cover everything, shard residuals one half
    "alltoall": (2 * (3280 + 544 + 256 + 64), (4 * (6400 + 1000 + 3200 + 512), 4 * (6400 + 1000 + 3200 + 488))),
    "dense": (4 * (6400 + 1000 + 100 + 10), 0),
    "signs": (1024 + 176 + 400 + 48, 4 * (6400 + 1000)),
    "cast": (12800 + 2000 + 208 + 32, 0),
}


def test_bytes_on_the_wire_and_of_residuals_between_two_ranks():
    for rank, found in enumerate(values_of(run_ranks(2, sizes))):
        for name, (sent, residual) in EXPECTED_OF_2.items():
            residual = residual[rank] if isinstance(residual, tuple) else residual
            first = sent if name == "dense" else 0.0  # the first step is not compressed
            assert found[name] == (first, sent, sent, sent, residual), name


def test_bytes_on_the_wire_between_four_ranks():
    # Quarters of 1600 and 256 elements: 16 + 7 scales (28 -> 32) + 1600 = 1648; 16 + 16 + 256 = 288. Quarters of the
    # biases, 32 and 16 elements: 128; 64.
    expected = {
        "allgather": 3 * (6528 + 1040 + 400 + 48),
        "alltoall": 2 * 3 * (1648 + 288 + 128 + 64),
        "dense": 2 * 3 / 4 * 4 * (6400 + 1000 + 100 + 10),
        "signs": 3 * (1024 + 176 + 400 + 48),
        "cast": 2 * 3 / 4 * (12800 + 2000 + 208 + 32),
    }
    for found in values_of(run_ranks(4, sizes)):
        assert {name: sent for name, (_, sent, _, _, _) in found.items()} == pytest.approx(expected, rel=1e-15)
