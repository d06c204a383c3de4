"""``compress`` after ``accelerator.prepare``: states resume with the same bits, and are saved by all ranks."""

from __future__ import annotations

import shutil
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("accelerate", reason="needs the extra 'accelerate'")

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from torch.nn.parallel import DistributedDataParallel

from gckernels import sync
from gckernels.sync.integrations.accelerate import compress
from gckernels.sync.stats.decisions import LOGGER
from ranks import run_ranks, values_of
from trainers import SAVED, STEPS, as_launched, digest, loss_of, network, shard_on_cpu

FOUR = "BlockQuant(bits=4)"


def accelerator_of(precision="no", accumulated=1, sharded=False):
    as_launched()
    AcceleratorState._reset_state(True)
    if not sharded:
        return Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulated)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="size_based_wrap",
        min_num_params=2000,
        reshard_after_forward=True,
        cpu_ram_efficient_loading=False,
        state_dict_type="SHARDED_STATE_DICT",
    )
    arguments = {"mixed_precision": precision, "gradient_accumulation_steps": accumulated}
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, **arguments)
    shard_on_cpu(plugin)
    return accelerator


def trained(folder, plan, start=0, allow_missing=False, **settings):
    """The digest of a training that saves its state at a step, or goes on from there."""
    accelerator = accelerator_of(**settings)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    attachment = compress(accelerator, model, plan, allow_missing=allow_missing)
    if start:
        accelerator.load_state(folder)
    for step in range(start, STEPS):
        rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, rows))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step + 1 == SAVED and not start:
            accelerator.save_state(folder)
    if settings.get("sharded"):
        model.reshard()
    found = digest(model.parameters()), attachment.steps
    attachment.close()
    dist.barrier()
    return found


def resumed(folder, plan, settings):
    whole = trained(folder, plan, **settings)
    again = trained(folder, plan, start=SAVED, **settings)
    if dist.get_rank() == 0:
        shutil.rmtree(f"{folder}/gckernels")
    dist.barrier()
    with pytest.raises(FileNotFoundError, match="has no whole state"):
        trained(folder, plan, start=SAVED, **settings)
    return whole, again, trained(folder, plan, SAVED, allow_missing=True, **settings)


@pytest.mark.parametrize(
    ("plan", "settings"),
    [
        (FOUR, {}),
        (FOUR, {"precision": "bf16", "accumulated": 2}),
        ("PowerSGD(rank=2)", {}),
        ("EFSignSGD", {}),
        (FOUR, {"sharded": True}),
        (FOUR, {"sharded": True, "precision": "bf16", "accumulated": 2}),
    ],
)
def test_a_state_resumes_with_the_same_bits(plan, settings, tmp_path):
    found = values_of(run_ranks(2, resumed, str(tmp_path), plan, settings))
    for whole, again, without in found:
        assert again == whole
        assert without[0] != whole[0], "the state makes a difference"
    assert found[0][0] == found[1][0]


def of_another_size(folder, start):
    return trained(folder, FOUR, start)


def test_another_number_of_ranks_loads_a_state(tmp_path):
    values_of(run_ranks(2, of_another_size, str(tmp_path), 0))
    for _, steps in values_of(run_ranks(3, of_another_size, str(tmp_path), SAVED)):
        assert steps == STEPS


def refused():
    accelerator = accelerator_of()
    model = accelerator.prepare(network())
    with pytest.raises(TypeError, match="model must be a DistributedDataParallel model or one of fully_shard"):
        compress(accelerator, model.module)
    with pytest.raises(ValueError, match=r"model must be one that accelerator\.prepare has returned"):
        compress(accelerator, DistributedDataParallel(network()))
    with pytest.raises(ValueError, match="bits"):
        compress(accelerator, model, "BlockQuant(bits=5)")
    assert not accelerator._save_model_state_pre_hook
    attachment = compress(accelerator, model)
    assert isinstance(attachment, sync.Attachment)
    attachment.close()


def test_wrong_arguments_change_nothing():
    values_of(run_ranks(2, refused))


def loaded_before(folder):
    """The warnings of a training whose checkpoint is loaded before its model is compressed, and after that."""
    trained(folder, FOUR)
    found = []
    for is_before in (True, False):
        accelerator, texts = accelerator_of(), []
        model = network()
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        with mock.patch.object(LOGGER, "warning", texts.append):
            if is_before:
                accelerator.load_state(folder)
            attachment = compress(accelerator, model, FOUR)
            if not is_before:
                accelerator.load_state(folder)
        found.append((len(texts), attachment.steps))
        attachment.close()
        dist.barrier()
    return found


def test_a_state_that_is_loaded_too_early_is_said_to_be_missing(tmp_path):
    found = values_of(run_ranks(2, loaded_before, str(tmp_path)))
    assert found == [[(1, 0), (0, SAVED)], [(0, 0), (0, SAVED)]]


def prepared_again(folder):
    """The steps in states that are saved by an accelerator whose first model still has an attachment."""
    accelerator = accelerator_of()
    first = accelerator.prepare(network())
    before = compress(accelerator, first, FOUR)
    accelerator.backward(loss_of(first, torch.ones(16, 64)))
    accelerator.free_memory()
    second = accelerator.prepare(network())
    after = compress(accelerator, second, FOUR)
    accelerator.save_state(folder)
    accelerator.backward(loss_of(second, torch.ones(16, 64)))
    accelerator.load_state(folder)
    found = before.steps, after.steps
    before.close()
    after.close()
    return found


def test_a_model_that_the_accelerator_has_forgotten_saves_nothing(tmp_path):
    assert values_of(run_ranks(2, prepared_again, str(tmp_path))) == [(1, 0)] * 2


def with_a_scaler():
    accelerator = accelerator_of()
    accelerator.scaler = torch.amp.GradScaler(torch.get_default_device().type)
    model = accelerator.prepare(network())
    attachment = compress(accelerator, model, FOUR)
    assert attachment._frontend.request.grad_scaler is accelerator.scaler
    attachment.close()


def test_the_gradient_scaler_is_that_of_the_accelerator():
    values_of(run_ranks(2, with_a_scaler))


def two_models(folder):
    accelerator = accelerator_of()
    models = accelerator.prepare(network(), network())
    attachments = [compress(accelerator, model, FOUR) for model in models]
    for model in models:
        loss_of(model, torch.ones(4, 64)).backward()
    accelerator.save_state(folder)
    attachments[1].close()
    accelerator.save_state(f"{folder}/later")
    attachments[0].close()


def test_each_model_has_a_folder(tmp_path):
    values_of(run_ranks(2, two_models, str(tmp_path)))
    assert {each.name for each in tmp_path.glob("gckernels*")} == {"gckernels", "gckernels_1"}
    assert {each.name for each in (tmp_path / "later").glob("gckernels*")} == {"gckernels"}, "the other one is closed"
