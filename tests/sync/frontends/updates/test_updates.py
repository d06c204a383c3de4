"""The mean of updates equals the mean in a plain loop, and the parameters are the same on all ranks."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gckernels
from gckernels import EFSignSGD, sync
from gckernels.sync import Attachment
from models import Mlp, build
from ranks import run_ranks, values_of
from workloads import SPECS, digest_of, mass_of, summed, topology

NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
SIGNS = "EFSignSGD(block=1024, magnitude='projection')"


class Normed(Mlp):
    """A network with a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(67))


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=lr)


def digest(model: nn.Module) -> str:
    return digest_of(model.parameters())


def on_all(text: str) -> bool:
    """Whether all ranks have the same text."""
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    return len(set(texts)) == 1


# -------------------------------------------------------------------- a plain loop


class PlainLoop:
    """Local SGD, or DiLoCo with an outer optimizer, in plain torch for fp32 parameters. Rounds end after some steps."""

    def __init__(self, model: nn.Module, ends: Sequence[int], outer: Any) -> None:
        self.parameters = [each for each in model.parameters() if each.requires_grad]
        self.anchors = [nn.Parameter(each.detach().clone()) for each in self.parameters]
        self.ends, self.outer, self.steps = ends, outer(self.anchors), 0

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        if self.steps not in self.ends:
            return
        for anchor, parameter in zip(self.anchors, self.parameters, strict=True):
            anchor.grad = (anchor - parameter) * (1 / dist.get_world_size())
            dist.all_reduce(anchor.grad)
        self.outer.step()
        for anchor, parameter in zip(self.anchors, self.parameters, strict=True):
            parameter.copy_(anchor)


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, after: Any = None) -> list[str]:
    """An ordinary training with accumulation, clipping and a schedule; the digest of the parameters after each step."""
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps, cycle_momentum=False)
    digests = []
    for step in range(steps):
        for part in range(2):
            model(model.batch(2 * step + part, dist.get_rank())).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if after is not None:
            after()
        digests.append(digest(model))
    return digests


def oracles() -> None:
    plain_mean = functools.partial(torch.optim.SGD, lr=1.0)
    growing = {0: 1, 3: 4, 9: 3}
    for model, every, outer, ends in (
        ("Zoo", 1, None, range(1, 13)),
        ("Zoo", 3, None, (3, 6, 9, 12)),
        ("Zoo", growing, None, (1, 2, 3, 7, 9, 12)),
        ("Normed", 4, NESTEROV, (4, 8, 12)),
        ("Branches", 3, NESTEROV, (3, 6, 9, 12)),
    ):
        torch.manual_seed(dist.get_rank())  # the parameters of rank 0 are taken
        mine = Normed() if model == "Normed" else build(model, seed=dist.get_rank())
        for tensor in (*mine.parameters(), *mine.buffers()):
            dist.broadcast(tensor.detach(), 0)
        others, first = copy.deepcopy(mine), digest(mine)
        if dist.get_rank():
            for parameter in mine.parameters():
                parameter.detach().add_(1.0)
        optimizer = adamw(mine)
        settings = {"every": every, "outer": outer, "scale_steps": False}  # the loop has no factors
        attachment = sync.attach(mine, sync.Updates(optimizer, "Identity", **settings))
        assert digest(mine) == first
        averager = PlainLoop(others, ends, outer or plain_mean)
        found = loop(mine, optimizer, 12)
        expected = loop(others, adamw(others), 12, averager.step)
        assert found == expected, (model, every)
        assert on_all(found[-1]) and len(set(found)) == 12
        assert [on_all(each) for each in found] == [step in ends for step in range(1, 13)]
        assert attachment.steps == len(ends)
        attachment.close()


def test_exact_updates_of_a_plain_loop():
    """Local SGD and DiLoCo in plain torch have the same parameters in every digit. Models have tied, frozen, unused and
    channels-last parameters and a batch norm, and the loop accumulates and clips gradients."""
    values_of(run_ranks(2, oracles))


# -------------------------------------------------------------------- all compressors


def every_compressor() -> dict[str, list[str] | None]:
    """By compressor the digests of the parameters after each step; ``None`` if it is refused."""
    found: dict[str, list[str] | None] = {}
    for spec in (*SPECS, SIGNS):
        model = build("Mlp")
        optimizer = adamw(model)
        try:
            attachment = sync.attach(model, sync.Updates(optimizer, spec, every=2))
        except ValueError as error:
            assert "mean" in str(error)
            found[spec] = None
            continue
        before, losses, digests = digest(model), [], list[str]()
        for _ in range(4):
            optimizer.zero_grad()
            loss = model(model.batch(0, dist.get_rank()))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            digests.append(digest(model))
        anchors = attachment.state_dict()["updates"]["anchors"]
        assert digest_of(anchors.values()) == digests[-1] != before
        assert losses[-1] < losses[0], spec
        assert attachment.stats()["step"] == 2 and attachment.sent_nbytes_per_step() > 0
        attachment.close()
        found[spec] = digests
    return found


def test_parameters_are_the_same_on_all_ranks():
    """With every compressor, parameters are bitwise identical between rounds. Momenta and votes are refused."""
    ranks = values_of(run_ranks(3, every_compressor))
    for spec in ranks[0]:
        if spec in ("DGC", "SigNUM", "SignSGD"):
            assert [found[spec] for found in ranks] == [None] * 3
        else:
            same = [len(set(digests)) == 1 for digests in zip(*(found[spec] for found in ranks), strict=True)]
            assert same == [False, True] * 2, spec


# -------------------------------------------------------------------- nothing is lost


DECAYS = (1.0, 0.5, 0.1)


def conserved(in_turns: bool) -> None:
    """Check compressors and programs, each with all decays, or with one of them in turns."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    cases = [(spec, "allgather") for spec in (EFSignSGD(), gckernels.BlockQuant(bits=4), gckernels.ChunkTopK())]
    if world_size > 2:
        cases += [(EFSignSGD(), "alltoall"), (gckernels.PowerSGD(), None)]
    for number, (compressor, program) in enumerate(cases):
        for decay in (DECAYS[(number + world_size) % 3],) if in_turns else DECAYS:
            model = nn.Linear(50, 40, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            plan = sync.uniform_plan(model, compressor, program=program)
            attachment = sync.attach(model, sync.Updates(optimizer, plan, every=2, decay=decay))
            start = model.weight.detach().double().clone()
            given, decayed = torch.zeros_like(start), torch.zeros_like(start)
            generator = torch.Generator().manual_seed(rank)
            for step in range(12):
                update = torch.randn(40, 50, generator=generator) * (1 + rank)
                before = model.weight.detach().clone()
                with torch.no_grad():
                    model.weight.add_(update)
                given += model.weight.detach().double() - before.double()
                optimizer.step()
                if step % 2 and step < 11:
                    decayed -= (1 - decay) * mass_of(attachment)["weight"][-1].view(40, 50)
            held = -mass_of(attachment)["weight"][-1].view(40, 50)  # residuals have the sign of gradients
            got = model.weight.detach().double() - start
            torch.testing.assert_close(got + held + decayed, summed(given) / world_size, rtol=0, atol=1e-4)
            assert bool(held.any()) and bool(decayed.any()) == (decay < 1)
            attachment.close()


@pytest.mark.parametrize("in_turns", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["in turns", "all"])
def test_what_was_not_sent_is_in_residuals(in_turns: bool):
    """Everything that was decoded, the residuals, and what their decay has taken from the residuals of each round, make
    up the updates of all ranks."""
    for world_size in (2, 3):
        values_of(run_ranks(world_size, conserved, in_turns))


# -------------------------------------------------------------------- kinds of training


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0, rank: int = -1) -> None:
    for step in range(first, first + steps):
        optimizer.zero_grad()
        dtype = next(model.parameters()).dtype
        model(model.batch(step, dist.get_rank() if rank < 0 else rank, dtype)).backward()
        optimizer.step()


def kinds() -> None:
    sixteen_bits()
    frozen_and_thawed()
    exact_start()
    with_a_scaler()
    another_plan()
    buffers()
    exact_rounds()


def sixteen_bits() -> None:
    """The anchors add up updates that are less than the resolution of the parameters."""
    model = nn.Linear(8, 8, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attachment = sync.attach(model, sync.Updates(optimizer, "Identity"))
    for step in range(16):
        with torch.no_grad():
            if dist.get_rank() == 0:  # half of it is the mean: a quarter of a step of bfloat16 at 1
                model.weight.add_(2**-7 if step % 2 == 0 else 0)
        optimizer.step()
        assert on_all(digest(model))
    anchors = attachment.state_dict()["updates"]["anchors"]["weight"]
    assert anchors.dtype == torch.float32
    assert torch.equal(anchors, torch.full((8, 8), 1 + 8 * 2**-8)) and torch.equal(model.weight.float(), anchors)
    attachment.close()


def frozen_and_thawed() -> None:
    model = build("Mlp")
    optimizer = adamw(model)
    attachment = sync.attach(model, sync.Updates(optimizer, EFSignSGD(), outer=NESTEROV))
    assert {unit.feedback for unit in attachment.plan.units} == {0.8}
    trained(model, optimizer, 3)
    sent = attachment.stats()["sent_nbytes"]
    layer = model.layers[0]
    layer.requires_grad_(False)
    for parameter in layer.parameters():
        parameter.grad = None
    before = digest(layer)
    trained(model, optimizer, 3, 3)
    assert digest(layer) == before  # the momentum of the outer optimizer does not move it
    assert attachment.stats()["sent_nbytes"] < sent
    layer.requires_grad_(True)
    trained(model, optimizer, 3, 6)
    assert digest(layer) != before and on_all(digest(model))
    assert attachment.stats()["sent_nbytes"] == sent
    attachment.close()


def exact_start() -> None:
    model = build("Mlp")
    optimizer = adamw(model)
    attachment = sync.attach(model, sync.Updates(optimizer, EFSignSGD(), every=3), start_step=4)
    assert {unit.feedback for unit in attachment.plan.units} == {1.0}
    for step in range(10):
        trained(model, optimizer, 1, step)
        assert on_all(digest(model)) == (step < 4 or step in (6, 9))
        assert (attachment.residual_nbytes() > 0) == (step >= 6)
    assert attachment.steps == 6
    attachment.close()


def with_a_scaler() -> None:
    """A step that is skipped on one rank counts there, as an update of zero."""
    model = build("Mlp")
    optimizer, scaler = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        torch.amp.GradScaler(torch.get_default_device().type, init_scale=4.0),
    )
    attachment = sync.attach(model, sync.Updates(optimizer, EFSignSGD(), every=2), grad_scaler=scaler)
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(model(model.batch(step, dist.get_rank()))).backward()
        if step == 2 and dist.get_rank() == 1:
            model.layers[0].weight.grad[0, 0] = torch.inf
        before = digest(model)
        scaler.step(optimizer)
        scaler.update()
        assert (digest(model) == before) == (step == 2 and dist.get_rank() == 1)
    assert on_all(digest(model)) and attachment.steps == 4
    assert scaler.get_scale() == (4.0 if dist.get_rank() == 0 else 2.0)
    attachment.close()
    assert "step" not in vars(scaler)
    other = build("Mlp")
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    attachment = sync.attach(other, sync.Updates(optimizer, EFSignSGD()))
    scaler.scale(other(other.batch(0, 0))).backward()
    try:
        scaler.step(optimizer)
        raise AssertionError("no error")
    except RuntimeError as error:
        assert "give it to sync.attach" in str(error)
    attachment.close()


def another_plan() -> None:
    """A change of the plan sends what residuals hold."""
    model = nn.Linear(50, 40, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attachment = sync.attach(model, sync.Updates(optimizer, "EFSignSGD", decay=1.0))
    start, given = model.weight.detach().double().clone(), torch.zeros(40, 50, dtype=torch.float64)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(6):
        if step == 4:
            attachment.change_plan(sync.uniform_plan(model, "BlockQuant(bits=4)"))
            assert attachment.is_changing
        update = torch.randn(40, 50, generator=generator)
        given += update.double()
        with torch.no_grad():
            model.weight.add_(update)
        optimizer.step()
        if step == 4:
            assert not attachment.is_changing and not mass_of(attachment)["weight"].any()
            got = model.weight.detach().double() - start
            torch.testing.assert_close(got, summed(given.clone()) / dist.get_world_size(), rtol=0, atol=1e-4)
    assert "BlockQuant" in repr(attachment)
    attachment.close()


def buffers() -> None:
    """Buffers are those of rank 0 at first. The statistics of a batch norm are the same after rounds, and the mean of
    those of the ranks; constants, integers and what is not saved with the model are left alone."""
    torch.manual_seed(0)
    model = Normed()
    norm = model.layers[1]
    norm.running_mean.fill_(dist.get_rank())
    model.register_buffer("constant", torch.full((3,), 0.1))
    model.register_buffer("cache", torch.zeros(3), persistent=False)
    optimizer = adamw(model)
    attachment = sync.attach(model, sync.Updates(optimizer, EFSignSGD(), every=2))
    assert not norm.running_mean.any()
    for step in range(4):
        model.cache.fill_(dist.get_rank())
        if step == 2:
            norm.running_var.mul_(2.0)
        before = [each.clone() for each in (norm.running_mean, norm.running_var)]
        model(model.batch(step, dist.get_rank())).backward()
        own = [each.clone() for each in (norm.running_mean, norm.running_var)]
        optimizer.step()
        optimizer.zero_grad()
        for found, mine, was in zip((norm.running_mean, norm.running_var), own, before, strict=True):
            assert not torch.equal(mine, was)
            mean = summed(mine.double()) / dist.get_world_size()
            torch.testing.assert_close(found.double(), mean if step % 2 else mine.double(), rtol=1e-6, atol=1e-7)
            assert on_all(digest_of([found])) == bool(step % 2)
    assert torch.equal(model.constant, torch.full((3,), 0.1)) and (model.cache == dist.get_rank()).all()
    attachment.close()


def exact_rounds() -> None:
    """A round that ends in ``exact`` leaves residuals alone. Nothing outlives the model, and copies have no hooks."""
    model = build("Mlp")
    optimizer = adamw(model)
    attachment = sync.attach(model, sync.Updates(optimizer, EFSignSGD(), every=2))
    trained(model, optimizer, 4)
    before = attachment.state_dict()["feedback"]["worker"]
    with attachment.exact():
        trained(model, optimizer, 2)
    after = attachment.state_dict()["feedback"]["worker"]
    assert on_all(digest(model)) and digest_of(before.values()) == digest_of(after.values())
    copies = pickle.loads(pickle.dumps(model)), copy.deepcopy(optimizer)
    copies[0].load_state_dict(model.state_dict())
    trained(model, optimizer, 2)
    gone = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert gone() is None and not attachment._frontend.is_open


def test_kinds_of_training():
    values_of(run_ranks(2, kinds))


def alone() -> None:
    """One rank goes through the same motions, and takes its own update."""
    model = build("Mlp")
    other = copy.deepcopy(model)
    optimizer, plain = adamw(model), adamw(other)
    attachment: Attachment = sync.attach(model, sync.Updates(optimizer, EFSignSGD(), every=2))
    trained(model, optimizer, 6)
    trained(other, plain, 6)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two)
    assert attachment.steps == 3 and attachment.residual_nbytes() == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(model.batch(0, 0)).backward()  # no watch of gradients
        model.zero_grad()
        model(model.batch(0, 0)).backward()
    attachment.close()


def test_one_rank():
    values_of(run_ranks(1, alone))


def levels() -> None:
    model = build("Mlp")
    optimizer = adamw(model)
    plan = sync.uniform_plan(model, EFSignSGD(), program="hierarchical", topology=topology(dist.get_world_size()))
    attachment = sync.attach(model, sync.Updates(optimizer, plan.parted(512), every=2))
    trained(model, optimizer, 4)
    assert on_all(digest(model))
    attachment.close()


def test_a_plan_with_levels_and_parts():
    values_of(run_ranks(4, levels))


def partly_planned() -> None:
    """Parameters that a plan does not have are averaged exactly, if that is allowed."""
    model, loop_model = build("Mlp"), build("Mlp")
    optimizer, loop = adamw(model), adamw(loop_model)
    plan = sync.uniform_plan(model, "Identity")
    left = plan.with_units([*plan.units][1:])
    updates = sync.Updates(optimizer, left, every=2, scale_steps=False)
    with pytest.raises(sync.PlanError, match="strict=False averages exactly what does not fit"):
        sync.attach(model, updates)
    with pytest.warns(UserWarning, match="attach: the plan does not fit the model"):
        attachment = sync.attach(model, updates, strict=False)
    other = sync.attach(loop_model, sync.Updates(loop, "Identity", every=2, scale_steps=False))
    trained(model, optimizer, 4)
    trained(loop_model, loop, 4)
    assert on_all(digest(model)) and digest(model) == digest(loop_model)
    attachment.close()
    other.close()


def test_a_plan_that_leaves_parameters_out():
    values_of(run_ranks(2, partly_planned))
