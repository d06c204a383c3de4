"""The strategies of Lightning: trainings resume with the same bits, and states go with checkpoints."""

from __future__ import annotations

import dataclasses
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

from gckernels import sync
from gckernels.sync.integrations.lightning import (
    CompressedDDPStrategy,
    CompressedModelParallelStrategy,
    CompressionStats,
)
from ranks import run_ranks, values_of
from trainers import Rows, as_launched, digest, loss_of, network

pytestmark = pytest.mark.host_only("trainers choose the device themselves")
FOUR = "BlockQuant(bits=4)"
EPOCHS, SAVED = 2, 4


class Network(pl.LightningModule):
    def __init__(self, sharded=False):
        super().__init__()
        self.network, self.sharded = network(), sharded
        self.validated = []  # losses

    def configure_model(self):
        if self.sharded:
            for layer in (self.network[0], self.network[2], self.network):
                fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            self.sharded = False

    def training_step(self, rows, _):
        return loss_of(self.network, rows)

    def validation_step(self, rows, _):
        loss = loss_of(self.network, rows)
        self.validated.append(loss.item())
        self.log("loss", loss, sync_dist=True)

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


# -------------------------------------------------------------------- averaged updates


def updates(every, **settings):
    return sync.Updates(plan="EFSignSGD", every=every, **settings)


class Scheduled(Network):
    """A network whose learning rate falls in each step."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def of_updates(folder, how, at, arguments):
    """The digests of a training, of one that resumes it, and of a plain loop; and losses of validations."""
    found, losses = [], []
    for resumed in (None, f"{folder}/step={at}.ckpt"):
        module = Scheduled()
        found.append(fitted(folder, module, CompressedDDPStrategy(how), resumed, **arguments))
        losses.append(module.validated)
    saved = torch.load(f"{folder}/step={at}.ckpt", weights_only=False)["state_dict"]
    return (*found, plain(how, arguments.get("accumulate_grad_batches", 1), arguments), losses, digest(saved.values()))


def fitted(folder, module, strategy, resumed=None, **arguments):
    trainer = trainer_of(folder, strategy, **arguments)
    data = Rows()
    sampler = torch.utils.data.DistributedSampler(data, dist.get_world_size(), dist.get_rank(), shuffle=False)
    loaders = [torch.utils.data.DataLoader(data, batch_size=16, sampler=each) for each in (sampler, None)]
    trainer.fit(module, *loaders, ckpt_path=resumed)
    dist.barrier()
    return digest(module.parameters())


def plain(how, accumulated, arguments):
    """The digest of a loop without Lightning, whose updates are averaged."""
    module, data = Scheduled(), Rows()
    (optimizer,), (schedule,) = module.configure_optimizers()
    attachment = sync.attach(module, dataclasses.replace(how, optimizer=optimizer))
    sampler = torch.utils.data.DistributedSampler(data, dist.get_world_size(), dist.get_rank(), shuffle=False)
    is_bf16 = arguments.get("precision") == "bf16-mixed"
    for _ in range(EPOCHS):
        for number, rows in enumerate(torch.utils.data.DataLoader(data, batch_size=16, sampler=sampler)):
            with torch.autocast("cpu", torch.bfloat16, enabled=is_bf16):
                loss = module.training_step(rows, 0)
            (loss / accumulated).backward()
            if (number + 1) % accumulated == 0:
                if "gradient_clip_val" in arguments:
                    torch.nn.utils.clip_grad_norm_(module.parameters(), arguments["gradient_clip_val"])
                optimizer.step()
                schedule["scheduler"].step()
                optimizer.zero_grad()
    attachment.end_round()
    attachment.close()
    return digest(module.parameters())


@pytest.mark.parametrize(
    ("how", "at", "arguments"),
    [
        (updates(2), 4, {"gradient_clip_val": 1.0}),
        (updates(3), 4, {"gradient_clip_val": 1.0}),
        (updates(3), 2, {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}),
        (updates(5, delay=2), 4, {}),
    ],
)
def test_updates_are_those_of_a_plain_loop_and_resume_with_the_same_bits(how, at, arguments, tmp_path):
    """Also where validations and checkpoints are inside a round. All ranks validate the same model."""
    found = values_of(run_ranks(2, of_updates, str(tmp_path), how, at, arguments))
    for whole, again, expected, (losses, later), _ in found:
        assert whole == again == expected
        assert losses[-len(later) :] == later
    assert found[0] == found[1]


class Interrupted(pl.Callback):
    def on_validation_epoch_end(self, trainer, *_):
        if trainer.global_step:
            raise KeyError("an evaluation fails")


def interrupted(folder):
    strategy = CompressedDDPStrategy(updates(3))
    module = Scheduled()
    with pytest.raises(KeyError, match="an evaluation fails"):
        trainer_of(folder, strategy, [Interrupted()]).fit(
            module, *[torch.utils.data.DataLoader(Rows(), batch_size=16) for _ in range(2)]
        )
    assert strategy.attachment is None
    return digest(module.parameters())


def test_a_training_that_fails_inside_a_round_ends(tmp_path):
    values_of(run_ranks(2, interrupted, str(tmp_path), timeout_s=60))


def of_shards(folder):
    kind = functools.partial(CompressedModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1)
    with pytest.raises(ValueError, match="each rank has a part of the model by fully_shard"):
        trained(folder, kind(updates(2)), sharded=True)


def test_updates_of_shards_are_refused(tmp_path):
    values_of(run_ranks(2, of_shards, str(tmp_path)))


class Manual(Network):
    """A network with two optimizers, which the training calls itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, rows, _):
        loss = loss_of(self.network, rows)
        for each in self.optimizers():
            each.zero_grad()
        self.manual_backward(loss)
        for each in self.optimizers():
            each.step()

    def configure_optimizers(self):
        return [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (self.network[0], self.network[2])]


def of_parts(folder, exclude):
    found = []
    for at in (None, f"{folder}/step=8.ckpt"):  # Lightning counts the steps of each optimizer
        module = Manual()
        strategy = CompressedDDPStrategy(updates(3), settings={"exclude": exclude})
        fitted(folder, module, strategy, at)
        found.append([digest(iter([each])) for each in module.parameters()])
    return found


def test_several_optimizers_that_the_training_calls_itself(tmp_path):
    (whole, again), (other, other_again) = values_of(run_ranks(2, of_parts, str(tmp_path), []))
    assert whole == again == other == other_again


def test_parameters_that_each_rank_has_alone(tmp_path):
    (whole, _), (other, _) = values_of(run_ranks(2, of_parts, str(tmp_path), ["network.2.bias"]))
    assert whole[:3] == other[:3] and whole[3] != other[3]
