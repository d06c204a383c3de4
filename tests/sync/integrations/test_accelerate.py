"""``compress`` after ``accelerator.prepare``: states resume with the same bits, and are saved by all ranks."""

from __future__ import annotations

import dataclasses
import functools
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

pytestmark = pytest.mark.host_only("trainers choose the device themselves")
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


def falling(step):
    """A learning rate that falls, relative to the first one."""
    return 1 / (1 + step)


def trained(folder, plan, start=0, allow_missing=False, saved=SAVED, **settings):
    """The digest of a training that saves its state at a step, or goes on from there."""
    accelerator = accelerator_of(**settings)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, falling)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
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
            schedule.step()
            optimizer.zero_grad()
        if step + 1 == saved and not start:
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


# -------------------------------------------------------------------- averaged updates


def updates(every=2, **settings):
    return sync.Updates(plan="EFSignSGD", every=every, **settings)


def plain(how, precision="no", accumulated=1):
    """The digest of a loop without Accelerate, whose updates are averaged as in :func:`trained`."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # the scheduler of Accelerate makes a step for each rank
    ranks = dist.get_world_size()
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: falling(ranks * step))
    attachment = sync.attach(model, dataclasses.replace(how, optimizer=optimizer))
    for step in range(STEPS):
        rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            found = model(rows)
        ((found.float() - rows.flip(1)).square().mean() / accumulated).backward()
        if (step + 1) % accumulated == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    found = digest(model.parameters()), attachment.steps
    attachment.close()
    return found


def of_updates(folder, how, saved, settings):
    """The digests of a training, of one that resumes it, and of a plain loop."""
    whole = trained(folder, how, saved=saved, **settings)
    again = trained(folder, how, start=saved, **settings)
    if dist.get_rank() == 0:
        shutil.rmtree(f"{folder}/gckernels")
    dist.barrier()
    with pytest.raises(FileNotFoundError, match="has no whole state"):
        trained(folder, how, start=saved, **settings)
    return whole, again, plain(how, **settings)


@pytest.mark.parametrize(
    ("how", "saved", "settings"),
    [
        (updates(), 4, {}),
        (updates(every=3, scale_steps=True), 4, {}),
        (updates(every=2), 6, {"precision": "bf16", "accumulated": 2}),
        (updates(every=4, delay=1, outer=functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9)), 5, {}),
    ],
)
def test_updates_are_those_of_a_plain_loop_and_resume_with_the_same_bits(how, saved, settings, tmp_path):
    """Also from the middle of a round."""
    for whole, again, expected in values_of(run_ranks(2, of_updates, str(tmp_path), how, saved, settings)):
        assert whole == again == expected


def updates_of_parts():
    """Attach to models of one accelerator, each with its own optimizers, and to those that cannot be served."""
    accelerator = accelerator_of()
    accelerator.scaler = torch.amp.GradScaler("cpu")
    models, optimizers = (network(), network()), []
    for model in models:
        optimizers += [torch.optim.AdamW(each.parameters()) for each in (model[0], model[2])]
    prepared = accelerator.prepare(*models, *optimizers)
    for model, own in zip(prepared[:2], (optimizers[:2], optimizers[2:]), strict=True):
        attachment = compress(accelerator, model, updates())
        assert attachment._frontend.request.optimizers == own
        assert attachment._frontend.request.scalers == [accelerator.scaler]
        assert not model.require_backward_grad_sync
        attachment.close()
    accelerator = accelerator_of()
    with pytest.raises(ValueError, match=r"optimizer must be one or a list of different ones, got \[\]"):
        compress(accelerator, accelerator.prepare(network()), updates())
    accelerator = accelerator_of(sharded=True)
    model = network()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match=r"each rank has a part of the model by fully_shard; let the model have rep"):
        compress(accelerator, model, updates())


def test_optimizers_are_those_of_the_model():
    values_of(run_ranks(2, updates_of_parts))


def synchronised_by_hand():
    accelerator = accelerator_of()
    model = network()
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    attachment = compress(accelerator, model, updates())
    loss = loss_of(model, torch.ones(4, 64))
    with accelerator.trigger_sync_in_backward(model), pytest.raises(RuntimeError, match="was about to average grad"):
        accelerator.backward(loss)
    attachment.close()


def test_gradients_that_accelerate_would_average_raise():
    values_of(run_ranks(2, synchronised_by_hand))


def with_skipped_steps():
    """The steps and digest of a training in whose third step the scaler of rank 0 finds infinities."""
    accelerator = accelerator_of()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    attachment = compress(accelerator, model, updates())
    skipped = []
    for step in range(6):
        rows = torch.randn(16, 64, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        accelerator.backward(loss_of(model, rows * (torch.inf if (step, dist.get_rank()) == (2, 0) else 1)))
        optimizer.step()
        skipped.append(optimizer.step_was_skipped)
        optimizer.zero_grad()
    attachment.close()
    return skipped, attachment.steps, digest(model.parameters())


def test_a_step_that_the_scaler_of_one_rank_skips_counts():
    (first, *one), (second, *other) = values_of(run_ranks(2, with_skipped_steps))
    assert one == other and one[0] == 3
    assert first == [False, False, True, False, False, False] and not any(second)
