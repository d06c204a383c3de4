"""Lightning Fabric: its models are attached as they are, and its checkpoints resume with the same bits."""

from __future__ import annotations

import logging
import os
import shutil

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("lightning", reason="needs the extra 'lightning'")

from lightning.fabric import Fabric

from gckernels import sync
from gckernels.sync.integrations.fabric import load, save
from ranks import run_ranks, values_of
from trainers import SAVED, STEPS, as_launched, digest, loss_of, network

pytestmark = pytest.mark.host_only("trainers choose the device themselves")


def rows_of(step):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))


def how_of(kind, optimizer):
    return "BlockQuant(bits=4)" if kind == "gradients" else sync.Updates(optimizer, "EFSignSGD", every=3)


def fabric_of(precision="32-true"):
    as_launched()
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp", precision=precision)
    fabric.launch()
    return fabric


def trained(folder, kind, start=0, allow_missing=False, **settings):
    """The digest of a training that saves a checkpoint, or goes on from there; its weights, and the next step of it."""
    fabric = fabric_of(**settings)
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    attachment = sync.attach(model, how_of(kind, optimizer))
    path, state = os.path.join(folder, "it.ckpt"), {"model": model, "optimizer": optimizer}
    if start:
        assert load(fabric, path, state, attachment, allow_missing=allow_missing) == {"step": SAVED}
    for step in range(start, STEPS):
        for part in range(2):
            with fabric.no_backward_sync(model, enabled=part == 0):
                fabric.backward(loss_of(model, rows_of(2 * step + part)) / 2)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
        if step + 1 == SAVED and not start:
            save(fabric, path, state | {"step": SAVED}, attachment)
    attachment.end_round()
    found = digest(model.parameters()), attachment.steps
    attachment.close()
    dist.barrier()
    return found


def plain(kind, precision="32-true"):
    """The digest of a loop without Fabric."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    attachment = sync.attach(model, how_of(kind, optimizer))
    for step in range(STEPS):
        for part in range(2):
            rows = rows_of(2 * step + part)
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
                made = model(rows)
            ((made.float() - rows.flip(1)).square().mean() / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    attachment.end_round()
    found = digest(model.parameters()), attachment.steps
    attachment.close()
    return found


def resumed(folder, kind, settings):
    whole = trained(folder, kind, **settings)
    again = trained(folder, kind, SAVED, **settings)
    if dist.get_rank() == 0:
        shutil.rmtree(f"{folder}/it.ckpt.gckernels")
    dist.barrier()
    with pytest.raises(FileNotFoundError, match="has no whole state"):
        trained(folder, kind, SAVED, **settings)
    expected = plain(kind, **settings) if kind == "updates" else whole
    weights = torch.load(f"{folder}/it.ckpt")["model"]
    return whole, again, expected, digest(weights.values()), before_round(settings) if kind == "updates" else None


def before_round(settings):
    """The digest of the parameters with which the round of the checkpoint began."""
    fabric = fabric_of(**settings)
    model = network()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    attachment = sync.attach(model, how_of("updates", optimizer))
    for step in range(3):
        for part in range(2):
            fabric.backward(loss_of(model, rows_of(2 * step + part)) / 2)
        fabric.clip_gradients(model, optimizer, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
    attachment.close()
    return digest(model.parameters())


@pytest.mark.parametrize("kind", ["gradients", "updates"])
@pytest.mark.parametrize("settings", [{}, {"precision": "bf16-mixed"}])
def test_checkpoints_resume_with_the_same_bits(kind, settings, tmp_path):
    """Also from the middle of a round, whose checkpoint has the weights that all ranks share; and updates are those of
    a plain loop."""
    found = values_of(run_ranks(2, resumed, str(tmp_path), kind, settings))
    for whole, again, expected, weights, shared in found:
        assert whole == again == expected
        assert shared is None or weights == shared
    assert found[0] == found[1]


def without_a_state(folder):
    trained(folder, "updates")
    if dist.get_rank() == 0:
        shutil.rmtree(f"{folder}/it.ckpt.gckernels")
    dist.barrier()
    return trained(folder, "updates", SAVED, allow_missing=True)


def test_a_checkpoint_without_a_state_is_loaded_if_that_is_said(tmp_path):
    """The parameters of the checkpoint are those of the next round then."""
    found = values_of(run_ranks(2, without_a_state, str(tmp_path)))
    assert found[0] == found[1]
