"""The overrides of torchtitan: its own optimizers and checkpoints resume with the same bits."""

import shutil
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("torchtitan", reason="needs the extra 'torchtitan'")

from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig
from torchtitan.config import OverrideConfig
from torchtitan.config.configurable import Configurable
from torchtitan.config.override import apply_overrides

from gckernels.sync.integrations import torchtitan
from ranks import run_ranks, values_of
from trainers import SAVED, STEPS, digest, loss_of, network

HERE = "gckernels.sync.integrations.torchtitan"


class Parts(Configurable):
    """The part of a trainer that has optimizers and checkpoints."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        optimizer: OptimizersContainer.Config
        checkpoint: CheckpointManager.Config


def parts_of(folder, plan, **states):
    """A model, its optimizers and its checkpoints, as torchtitan makes them from its configuration and overrides."""
    model = network()
    for module in (model[0], model[2], model):
        fully_shard(module)
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2})]
    config = Parts.Config(
        optimizer=OptimizersContainer.Config(param_groups=groups, implementation="for-loop"),
        checkpoint=CheckpointManager.Config(enable=True, interval=SAVED, last_save_model_only=False),
    )
    imports = [(f"{HERE}.compression", {"plan": plan}), (f"{HERE}.states", states)]
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


def trained(folder, plan, start=0, **states):
    model, optimizers, checkpoints = parts_of(folder, plan, **states)
    assert checkpoints.load() == (start > 0)
    for step in range(start, STEPS):
        loss_of(
            model, torch.randn(16, 64, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
        ).backward()
        optimizers.step()
        optimizers.zero_grad()
        if step + 1 == SAVED:
            checkpoints.save(step + 1)
    model.reshard()
    found = digest(model.parameters()), optimizers.attachment.steps
    optimizers.attachment.close()
    checkpoints.close()
    dist.barrier()
    return found


def resumed(folder, plan):
    whole = trained(folder, plan)
    again = trained(folder, plan, SAVED)
    if dist.get_rank() == 0:
        shutil.rmtree(f"{folder}/checkpoint/step-{SAVED}/gckernels")
    dist.barrier()
    with pytest.raises(FileNotFoundError, match="has no whole state"):
        trained(folder, plan, SAVED)
    return whole, again, trained(folder, plan, SAVED, allow_missing=True)


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
