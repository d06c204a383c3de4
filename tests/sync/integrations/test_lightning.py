"""The strategies of Lightning: trainings resume with the same bits, and states go with checkpoints."""

from __future__ import annotations

import functools
import logging
import shutil

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("lightning", reason="needs the extra 'lightning'")

import lightning.pytorch as pl
from lightning.pytorch.loggers.logger import DummyLogger
from torch.distributed.fsdp import fully_shard

from gckernels.sync.integrations.lightning import (
    CompressedDDPStrategy,
    CompressedModelParallelStrategy,
    CompressionStats,
)
from ranks import run_ranks, values_of
from trainers import Rows, as_launched, digest, loss_of, network

FOUR = "BlockQuant(bits=4)"
EPOCHS, SAVED = 2, 4


class Network(pl.LightningModule):
    def __init__(self, sharded=False):
        super().__init__()
        self.network, self.sharded = network(), sharded

    def configure_model(self):
        if self.sharded:
            for layer in (self.network[0], self.network[2], self.network):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            self.sharded = False

    def training_step(self, rows, _):
        return loss_of(self.network, rows)

    def validation_step(self, rows, _):
        self.log("loss", loss_of(self.network, rows), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Logger(DummyLogger):
    def __init__(self):
        super().__init__()
        self.logged = []

    def log_metrics(self, metrics, step=None):
        self.logged.append((step, metrics))


def trainer_of(folder, strategy, callbacks=(), **arguments):
    as_launched()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    saver = pl.callbacks.ModelCheckpoint(
        dirpath=folder, save_on_train_epoch_end=True, filename="{step}", save_top_k=arguments.pop("save_top_k", -1)
    )
    given = {
        "accelerator": "cpu",
        "devices": dist.get_world_size(),
        "max_epochs": EPOCHS,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "limit_val_batches": 2,
        "use_distributed_sampler": False,
    }
    return pl.Trainer(strategy=strategy, callbacks=[saver, *callbacks], **given | arguments)


def trained(folder, strategy, resumed=None, callbacks=(), sharded=False, **arguments):
    """The digest of a trained model, and the steps that its attachment has counted."""
    trainer = trainer_of(folder, strategy, callbacks, **arguments)
    model, data = Network(sharded), Rows()
    sampler = torch.utils.data.DistributedSampler(data, dist.get_world_size(), dist.get_rank(), shuffle=False)
    loaders = [torch.utils.data.DataLoader(data, batch_size=16, sampler=each) for each in (sampler, None)]
    trainer.fit(model, *loaders, ckpt_path=resumed)
    found = digest(model.parameters())
    dist.barrier()
    return found


def resumed(folder, kind, plan, arguments):
    if kind is CompressedModelParallelStrategy:
        kind = functools.partial(kind, data_parallel_size=2, tensor_parallel_size=1)
    at = f"{folder}/step={SAVED if 'accumulate_grad_batches' not in arguments else SAVED // 2}.ckpt"
    whole = trained(folder, kind(plan), **arguments)
    again = trained(folder, kind(plan), at, **arguments)
    if dist.get_rank() == 0:
        shutil.rmtree(f"{at}.gckernels")
    dist.barrier()
    with pytest.raises(FileNotFoundError, match="has no whole state"):
        trained(folder, kind(plan), at, **arguments)
    return whole, again, trained(folder, kind(plan, allow_missing=True), at, **arguments)


ACCUMULATED = {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}


@pytest.mark.parametrize(
    ("kind", "plan", "arguments"),
    [
        (CompressedDDPStrategy, FOUR, {"gradient_clip_val": 1.0}),
        (CompressedDDPStrategy, FOUR, ACCUMULATED),
        (CompressedDDPStrategy, "PowerSGD(rank=2)", {}),
        (CompressedDDPStrategy, "EFSignSGD", {}),
        (CompressedModelParallelStrategy, FOUR, {"sharded": True}),
    ],
)
def test_a_training_resumes_with_the_same_bits(kind, plan, arguments, tmp_path):
    found = values_of(run_ranks(2, resumed, str(tmp_path), kind, plan, arguments))
    for whole, again, without in found:
        assert again == whole
        assert without != whole, "the state makes a difference"
    assert found[0] == found[1]


def rotated(folder):
    logger = Logger()
    trained(
        folder,
        CompressedDDPStrategy(FOUR),
        callbacks=[CompressionStats()],
        logger=logger,
        log_every_n_steps=2,
        save_top_k=1,
    )
    return [(step, values["gckernels/step"]) for step, values in logger.logged if "gckernels/step" in values]


def test_states_are_removed_with_checkpoints_and_figures_are_logged(tmp_path):
    for steps in values_of(run_ranks(2, rotated, str(tmp_path))):
        assert steps == [(2, 2), (4, 4), (6, 6), (8, 8)]
    assert {each.name for each in tmp_path.iterdir()} == {"step=8.ckpt", "step=8.ckpt.gckernels"}


def of_another_size(folder, at):
    return trained(folder, CompressedDDPStrategy(FOUR), at)


def test_another_number_of_ranks_resumes(tmp_path):
    values_of(run_ranks(2, of_another_size, str(tmp_path), None))
    found = values_of(run_ranks(3, of_another_size, str(tmp_path), f"{tmp_path}/step={SAVED}.ckpt"))
    assert len({*found}) == 1
