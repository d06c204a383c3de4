"""Wrappers that average gradients are silent while updates are averaged: DDP over the same ranks, replicas of FSDP2."""

from __future__ import annotations

import contextlib
import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from gckernels import sync
from ranks import run_ranks, values_of
from workloads import digest_of

SIGNS = "EFSignSGD"
NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 8))


def loss_of(model: nn.Module, step: int, source: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + source)
    return model(torch.randn(8, 6, generator=generator)).square().mean()


def values(model: nn.Module) -> list[torch.Tensor]:
    model = getattr(model, "module", model)
    return [*map(local, model.parameters()), *(each for each in model.buffers() if each.is_floating_point())]


def local(parameter: Any) -> torch.Tensor:
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def trained(model: nn.Module, optimizer: Any, steps: range, accumulated: int, source: int) -> list[str]:
    """Digests of a model behind each step, of which all but the last part is in the ``no_sync`` of DDP."""
    digests = []
    for step in steps:
        before = collectives()
        for part in range(accumulated):
            is_last = part == accumulated - 1
            with contextlib.nullcontext() if is_last or not hasattr(model, "no_sync") else model.no_sync():
                (loss_of(model, accumulated * step + part, source) / accumulated).backward()
        assert collectives() == before, "nothing is sent before the step of the optimizer"
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        digests.append(digest_of(values(model)))
    return digests


def collectives() -> int:
    """The number of collectives that this rank has begun so far, where the backend counts them."""
    group = dist.distributed_c10d._get_default_group()
    return group._get_sequence_number_for_group() if dist.get_backend() == "gloo" else 0


def in_ddp(options: dict[str, Any], accumulated: int) -> None:
    found = []
    for wrap in (lambda model: model, lambda model: DistributedDataParallel(model, **options)):
        model = wrap(net())
        optimizer = adamw(model)
        attachment = sync.attach(model, sync.Updates(optimizer, SIGNS, every=2))
        digests = trained(model, optimizer, range(7), accumulated, dist.get_rank())
        if isinstance(model, DistributedDataParallel):
            loss_of(model, 7, dist.get_rank()).backward()
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, digest_of(each.grad for each in model.parameters()))
            assert len({*everyone}) == len(everyone), "gradients are those of each rank"
        attachment.close()
        found.append((digests, attachment.steps))
    assert found[0] == found[1] and found[0][1] == 3


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}])
def test_a_model_in_ddp_trains_as_without_it(options: dict[str, Any], accumulated: int):
    values_of(run_ranks(2, in_ddp, options, accumulated))


def averages_again() -> None:
    """Gradients of a DDP model behind an attachment are those of one that never had it."""
    gradients = []
    for has_attachment in (True, False):
        model = DistributedDataParallel(net())
        if has_attachment:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            attachment = sync.attach(model, sync.Updates(optimizer, "Identity"))
            trained(model, optimizer, range(2), 1, dist.get_rank())
            attachment.close()
            model.module.load_state_dict(net().state_dict())
        for _ in range(3):
            model.zero_grad()
            loss_of(model, 5, dist.get_rank()).backward()
            gradients.append(digest_of(each.grad for each in model.parameters()))
    assert len({*gradients}) == 1
    attachment = sync.attach(model, "BlockQuant")
    attachment.close()


def test_ddp_averages_when_the_attachment_is_closed():
    values_of(run_ranks(2, averages_again))


def woken(how: str) -> str:
    """The error of a backward in which DDP would average."""
    model = DistributedDataParallel(net())
    optimizer = adamw(model)
    context = model.no_sync()
    if how == "no_sync":
        context.__enter__()
    attachment = sync.attach(model, sync.Updates(optimizer, SIGNS, every=2))
    if how == "no_sync":
        context.__exit__(None, None, None)
    else:
        model.require_backward_grad_sync = True
    with pytest.raises(RuntimeError, match="was about to average gradients, and their updates") as caught:
        loss_of(model, 0, dist.get_rank()).backward()
    attachment.close()
    return str(caught.value)


@pytest.mark.parametrize("how", ["set", "no_sync"])
def test_ddp_that_would_average_raises(how: str):
    values_of(run_ranks(2, woken, how))


def refused() -> None:
    static = DistributedDataParallel(net(), static_graph=True)
    hooked = DistributedDataParallel(net())
    hooked.register_comm_hook(None, _hook)
    for model, text in ((static, "static_graph=True"), (hooked, "has a communication hook already")):
        with pytest.raises(ValueError, match=text):
            sync.attach(model, sync.Updates(adamw(model), SIGNS))
        assert model.require_backward_grad_sync
    model = DistributedDataParallel(net())
    attachment = sync.attach(model, sync.Updates(adamw(model), SIGNS))
    with pytest.raises(ValueError, match="has a gckernels attachment already"):
        sync.attach(model)
    with pytest.raises(ValueError, match="is synchronised by another attachment"):
        sync.attach(model, sync.Updates(adamw(model), SIGNS))
    assert not model.require_backward_grad_sync
    attachment.close()
    with pytest.raises(TypeError, match=r"optimizer must be given, .* got None; only the integrations of trainers"):
        sync.attach(net(), sync.Updates(every=2))


def _hook(_, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def test_refusals():
    values_of(run_ranks(2, refused))


# -------------------------------------------------------------------- FSDP2


def linear(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 8))


def with_replicas(kind: str, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer, sync.Attachment]:
    """A model with two replicas, of two shards each or of none; or two sites of two shards each, without replicas."""
    device = torch.get_default_device().type
    model = linear()
    if kind == "replicate":
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        wrap, group = functools.partial(replicate, mesh=mesh), None
    else:
        mesh = init_device_mesh(device, (2, 2), mesh_dim_names=("between", "inside"))
        wrap, group = functools.partial(fully_shard, mesh=mesh), None
        if kind == "sites":
            wrap, group = functools.partial(fully_shard, mesh=mesh["inside"]), mesh["between"].get_group()
    for each in (model[0], model):
        wrap(each)
    optimizer = adamw(model)
    attachment = sync.attach(model, sync.Updates(optimizer, SIGNS, **settings), process_group=group)
    return model, optimizer, attachment


def without_no_sync(model: nn.Module, optimizer: Any, steps: range) -> list[str]:
    digests = []
    for step in steps:
        loss_of(model, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()
        digests.append(digest_of(values(model)))
    return digests


def like_sites() -> None:
    found = []
    for kind in ("sites", "replicas"):
        model, optimizer, attachment = with_replicas(kind, every=2, outer=NESTEROV)
        assert attachment.stats()["world_size"] == 2
        found.append(without_no_sync(model, optimizer, range(7)))
        if kind == "replicas":
            with pytest.raises(ValueError, match="is synchronised by another attachment"):
                sync.attach(model)
        attachment.close()
        loss_of(model, 7, 0).backward()  # FSDP averages over its replicas again
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, digest_of(each.grad.to_local() for each in model.parameters()))
    assert found[0] == found[1]


def test_replicas_train_as_sites_without_replicas():
    values_of(run_ranks(4, like_sites, fresh=True, exits=False))


def like_bare() -> None:
    model, optimizer, attachment = with_replicas("replicate", every=2)
    found = without_no_sync(model, optimizer, range(7))
    attachment.close()
    model = linear()
    optimizer = adamw(model)
    attachment = sync.attach(model, sync.Updates(optimizer, SIGNS, every=2))
    assert without_no_sync(model, optimizer, range(7)) == found
    attachment.close()


def test_replicas_of_whole_models_train_as_bare_modules():
    values_of(run_ranks(2, like_bare, fresh=True, exits=False))


def resumed(folder: str) -> None:
    model, optimizer, attachment = with_replicas("replicas", every=3)
    without_no_sync(model, optimizer, range(5))
    state = attachment.state_dict()
    dcp.save({"gckernels": attachment.checkpoint()}, checkpoint_id=folder)
    expected = without_no_sync(model, optimizer, range(5, 10))
    attachment.close()
    for form in ("own", "dcp"):
        model, optimizer, attachment = with_replicas("replicas", every=3)
        if form == "own":
            attachment.load_state_dict(copy.deepcopy(state))
        else:
            dcp.load({"gckernels": attachment.checkpoint(reads=folder)}, checkpoint_id=folder)
        assert without_no_sync(model, optimizer, range(5, 10)) == expected, form
        attachment.close()


def test_replicas_resume_inside_a_round(tmp_path: Any):
    values_of(run_ranks(4, resumed, str(tmp_path), fresh=True, exits=False))


# -------------------------------------------------------------------- the model in common


def in_common(kind: str, settings: dict[str, Any]) -> None:
    """Inside a round the shared model is the one of its begin, and a training goes on as if nobody had looked."""
    found = []
    for looks in (False, True):
        if kind == "bare":
            model = net()
            optimizer = adamw(model)
            attachment = sync.attach(model, sync.Updates(optimizer, "BlockQuant", **settings))
        else:
            model, optimizer, attachment = with_replicas(kind, **settings)
        digests, before = [], None
        for step in range(8):
            if looks:
                own = digest_of(values(model))
                with attachment.shared(), attachment.shared(), torch.no_grad():
                    model.eval()
                    shared = digest_of(values(model))
                    losses: list[Any] = [None] * dist.get_world_size()
                    dist.all_gather_object(losses, loss_of(model, 99, 0).item())
                    assert len({*losses}) == 1, "all ranks evaluate the same model"
                    if step % settings["every"] and "fragments" not in settings:
                        assert shared == before != own
                    before = shared
                    saved = attachment.state_dict()["updates"]["parameters"]
                model.train()
                for each in model.modules() if kind != "bare" else ():
                    getattr(each, "reshard", bool)()  # FSDP keeps what an evaluation has gathered
                assert digest_of(values(model)) == own
                own_values = dict(model.named_parameters())
                for name, each in saved.items():
                    assert digest_of([each]) == digest_of([local(own_values[name])]), "a state has those of this rank"
            digests += without_no_sync(model, optimizer, range(step, step + 1))
        attachment.close()
        found.append(digests)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("bare", {"every": 3}),
        ("bare", {"every": 4, "fragments": 2, "delay": 1}),
        ("replicate", {"every": 3}),
    ],
)
def test_the_model_in_common(kind: str, settings: dict[str, Any]):
    values_of(run_ranks(2, in_common, kind, settings, fresh=kind != "bare", exits=kind == "bare"))


def step_inside() -> None:
    model = net()
    optimizer = adamw(model)
    attachment = sync.attach(model, sync.Updates(optimizer, SIGNS, every=2))
    without_no_sync(model, optimizer, range(1))
    loss_of(model, 1, 0).backward()
    with attachment.shared(), pytest.raises(RuntimeError, match=r"an optimizer makes a step in shared\(\)"):
        optimizer.step()
    optimizer.step()
    assert attachment.steps == 1
    attachment.close()
    attachment = sync.attach(model, "BlockQuant")
    with attachment.shared():
        loss_of(model, 0, 0).backward()
    attachment.close()


def test_no_step_changes_the_model_in_common():
    values_of(run_ranks(2, step_inside))


def ended(settings: dict[str, Any]) -> None:
    """The parameters behind a round that ends early are those of a schedule that ends it there."""
    found = []
    for is_early in (True, False):
        model = net()
        optimizer = adamw(model)
        own = settings if is_early else settings | {"every": {0: settings["every"], 5: settings["every"]}}
        attachment = sync.attach(model, sync.Updates(optimizer, SIGNS, **own))
        without_no_sync(model, optimizer, range(5))
        attachment.end_round()
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, digest_of(values(model)))
        assert len({*everyone}) == 1
        steps = attachment.steps
        attachment.end_round()  # there is nothing to average
        assert attachment.steps == steps
        found.append([everyone[0], *without_no_sync(model, optimizer, range(5, 8))])
        attachment.close()
        attachment.end_round()
    assert found[0] == found[1]


@pytest.mark.parametrize("settings", [{"every": 3, "scale_steps": False}, {"every": 3, "outer": NESTEROV}])
def test_a_round_ends_early(settings: dict[str, Any]):
    values_of(run_ranks(2, ended, settings))


def streaming_ended() -> None:
    model = net()
    optimizer = adamw(model)
    attachment = sync.attach(model, sync.Updates(optimizer, SIGNS, every=6, fragments=2, delay=2))
    without_no_sync(model, optimizer, range(10))  # a fragment is on its way
    attachment.end_round()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, digest_of(values(model)))
    assert len({*everyone}) == 1
    without_no_sync(model, optimizer, range(7))
    model.load_state_dict(net(1).state_dict())
    with pytest.raises(RuntimeError, match="has loaded a state_dict since"):
        attachment.end_round()
    attachment.close()


def test_a_round_of_fragments_ends_early():
    values_of(run_ranks(2, streaming_ended))
