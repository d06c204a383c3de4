"""The overrides of torchtitan: its own optimizers and checkpoints resume with the same bits."""

import dataclasses
import functools
import shutil
import types
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

pytest.importorskip("torchtitan", reason="needs the extra 'torchtitan'")

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import OverrideConfig
from torchtitan.config.configurable import Configurable
from torchtitan.config.override import apply_overrides

from gckernels import sync
from gckernels.sync.integrations import torchtitan
from ranks import run_ranks, values_of
from trainers import SAVED, STEPS, digest, loss_of, network

pytestmark = pytest.mark.host_only("trainers choose the device themselves")
HERE = "gckernels.sync.integrations.torchtitan"


class Parts(Configurable):
    """The part of a trainer that has optimizers and checkpoints."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        optimizer: OptimizersContainer.Config
        checkpoint: CheckpointManager.Config


def sharded(has_replicas, divides=True):
    """A model of FSDP2, with two replicas or without; FSDP divides its gradients, or leaves that to the loss."""
    model = network()
    sizes, names = ((2, 2), ("dp_replicate", "fsdp")) if has_replicas else ((dist.get_world_size(),), ("fsdp",))
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
        if not divides:  # as torchtitan does
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def parts_of(folder, override, arguments, divides=True, initial_load_path=None, **states):
    """A model, its optimizers and its checkpoints, as torchtitan makes them from its configuration and overrides."""
    model = sharded(override == "updates", divides)
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})]
    config = Parts.Config(
        optimizer=OptimizersContainer.Config(param_groups=groups, implementation="for-loop"),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=SAVED, last_save_model_only=False, initial_load_path=initial_load_path
        ),
    )
    imports = [(f"{HERE}.{override}", arguments), (f"{HERE}.states", states)]
    apply_overrides(OverrideConfig(imports=imports), config)
    optimizers = config.optimizer.build(model_parts=[model])
    others = {"dataloader": None, "lr_schedulers": Nothing(), "states": {}, "sd_adapter": None}
    checkpoints = config.checkpoint.build(model_parts=[model], optimizers=optimizers, base_folder=str(folder), **others)
    return model, optimizers, checkpoints


class Nothing:
    """The schedules of learning rates, which have no state here."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def rows_of(step):
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(4 * step + dist.get_rank()))


def trained(folder, override, arguments, start=0, divides=True, **states):
    model, optimizers, checkpoints = parts_of(folder, override, arguments, divides, **states)
    assert checkpoints.load() == (start > 0 or "initial_load_path" in states)
    for step in range(start, STEPS):
        (loss_of(model, rows_of(step)) / (1 if divides else dist.get_world_size())).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizers.step()
        optimizers.zero_grad()
        if step + 1 in (SAVED, STEPS) and start < step + 1:
            checkpoints.save(step + 1, last_step=step + 1 == STEPS and override == "updates")
    model.reshard()
    found = digest(model.parameters()), optimizers.attachment.steps
    optimizers.attachment.close()
    checkpoints.close()
    dist.barrier()
    return found


def resumed(folder, plan):
    given = "compression", {"how": plan}
    whole = trained(folder, *given)
    if dist.get_rank() == 0:
        shutil.rmtree(f"{folder}/checkpoint/step-{STEPS}")
    dist.barrier()
    again = trained(folder, *given, SAVED)
    if dist.get_rank() == 0:
        shutil.rmtree(f"{folder}/checkpoint/step-{STEPS}")
    if dist.get_rank() == 0:
        shutil.rmtree(f"{folder}/checkpoint/step-{SAVED}/gckernels")
    dist.barrier()
    with pytest.raises(FileNotFoundError, match="has no whole state"):
        trained(folder, *given, SAVED)
    return whole, again, trained(folder, *given, SAVED, allow_missing=True)


@pytest.mark.parametrize("plan", ["BlockQuant(bits=4)", "EFSignSGD"])
def test_checkpoints_resume_with_the_same_bits(plan, tmp_path):
    for whole, again, without in values_of(run_ranks(2, resumed, str(tmp_path), plan)):
        assert again == whole and whole[1] == STEPS
        assert without[0] != whole[0], "the state makes a difference"


def test_pipelines_are_refused():
    config = torchtitan.CompressedOptimizers.Config(
        param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})],
        implementation="for-loop",
    )
    with pytest.raises(ValueError, match="pipeline_parallel_degree must be 1"):
        config.build(model_parts=[network(), network()])


# -------------------------------------------------------------------- averaged updates

UPDATES = {"every": {"0": 3, "6": 3}, "plan": "EFSignSGD", "outer": {"lr": 0.7, "momentum": 0.9, "nesterov": True}}


def plain(settings, scale=1.0):
    """The digest of a loop without torchtitan."""
    model = sharded(has_replicas=True)
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(scale)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    attachment = sync.attach(model, dataclasses.replace(settings, optimizer=optimizer))
    for step in range(STEPS):
        loss_of(model, rows_of(step)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    attachment.end_round()
    found = digest(model.parameters()), attachment.steps
    attachment.close()
    return found


def of_updates(folder):
    """The digests of a training, of one in which the loss is divided, of one that is resumed, and of a plain loop."""
    outer = functools.partial(torch.optim.SGD, **UPDATES["outer"])
    expected = plain(sync.Updates(plan="EFSignSGD", every={0: 3, 6: 3}, outer=outer))
    divided = trained(f"{folder}/divided", "updates", UPDATES, divides=False)
    whole = trained(folder, "updates", UPDATES)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(f"{folder}/checkpoint/step-{STEPS}")
    dist.barrier()
    return expected, divided, whole, trained(folder, "updates", UPDATES, SAVED)


def test_updates_are_those_of_a_plain_loop_and_resume_with_the_same_bits(tmp_path):
    """With the average over replicas left out, whether FSDP divides gradients or not; from the middle of a round."""
    for expected, *others in values_of(run_ranks(4, of_updates, str(tmp_path), fresh=True, exits=False, timeout_s=200)):
        assert others == [expected] * 3


def of_other_weights(folder):
    """The digests of a training that begins with the weights of another one, and of a plain loop."""
    model = sharded(has_replicas=True)
    with torch.no_grad():
        for each in model.parameters():
            each.mul_(0.5)
    weights = f"{folder}/weights"
    dcp.save(model.state_dict(), checkpoint_id=weights)
    found = trained(f"{folder}/own", "updates", {"every": 3, "plan": "EFSignSGD"}, initial_load_path=weights)
    return found, plain(sync.Updates(plan="EFSignSGD", every=3), scale=0.5)


def test_updates_begin_with_weights_that_are_loaded(tmp_path):
    for found, expected in values_of(run_ranks(4, of_other_weights, str(tmp_path), fresh=True, exits=False)):
        assert found == expected


def evaluated(folder):
    model, optimizers, checkpoints = parts_of(folder, "updates", {"every": 2})
    for step in range(2):
        model.eval()
        with torch.no_grad():
            if step:
                with pytest.raises(RuntimeError, match=r"evaluated inside a round, .*--validator.freq"):
                    model(rows_of(step))
            else:
                model(rows_of(step))
        model.train()
        loss_of(model, rows_of(step)).backward()
        optimizers.step()
    optimizers.attachment.close()
    checkpoints.close()


def test_evaluations_inside_a_round_are_refused(tmp_path):
    values_of(run_ranks(4, evaluated, str(tmp_path), fresh=True, exits=False))


def of_shards(folder):
    model = network()
    fully_shard(model)
    config = torchtitan.CompressedOptimizers.Config(
        param_groups=[ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})],
        implementation="for-loop",
        updates={"every": 2},
    )
    with pytest.raises(ValueError, match=r"each rank has a part of the model by fully_shard; let the model have repli"):
        config.build(model_parts=[model])


def test_updates_of_shards_are_refused(tmp_path):
    values_of(run_ranks(2, of_shards, str(tmp_path), fresh=True, exits=False))


def logged():
    config = torchtitan.figures(MetricsProcessor.Config())
    processor = object.__new__(torchtitan.CompressionMetrics)
    model = sharded(has_replicas=False)
    processor.optimizers = types.SimpleNamespace(attachment=sync.attach(model, "BlockQuant"))
    with mock.patch.object(MetricsProcessor, "log") as log:
        processor.log(3, 1.0, 1.0, 1.0, extra_metrics={"lr": 0.1})
    processor.optimizers.attachment.close()
    *_, given = log.call_args.args
    assert type(config) is torchtitan.CompressionMetrics.Config
    assert given["lr"] == 0.1 and given["gckernels/step"] == 0


def test_figures_are_among_the_metrics():
    values_of(run_ranks(2, logged, fresh=True, exits=False))
