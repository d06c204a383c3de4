"""An attachment on one rank, on some of the ranks, and for some of the parameters."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ddp_models import trained, wrapped
from gckernels import BlockQuant, EFSignSGD, sync
from gckernels.sync import attach
from gckernels.sync.programs import ALLGATHER, ALLREDUCE, ALLTOALL
from gckernels.sync.resources.feedback import KINDS
from leftovers import lanes
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from workloads import digest_of

# -------------------------------------------------------------------- one rank, some of the ranks


def alone() -> None:
    expected = trained(wrapped(), range(6))
    for program in (None, ALLREDUCE, ALLGATHER, ALLTOALL):
        model = wrapped()
        attachment = attach(model, sync.uniform_plan(model, EFSignSGD(), program=program))
        assert trained(model, range(6)) == expected
        assert attachment.sent_nbytes_per_step() == 0.0 and attachment.residual_nbytes() == 0
        state = attachment.state_dict()
        steps = 0 if program == ALLREDUCE else 6  # a plan that compresses nothing leaves them to DDP
        expected_state = {"step": steps, "rank": 0, "world_size": 1, "plan": attachment.plan.to_json(), "units": []}
        assert expected_state.items() <= state.items() and state["feedback"] == {kind: {} for kind in KINDS}
        attachment.load_state_dict(state)
        attachment.close()
        assert not lanes()


def test_one_rank_is_as_without_a_hook():
    values_of(run_ranks(1, alone))


def on_a_subgroup() -> str | None:
    group = dist.new_group([0, 2])
    digest = None
    if dist.get_rank() != 1:
        model = wrapped(group=group)
        attachment = attach(model, sync.uniform_plan(model, BlockQuant(), program=ALLTOALL))
        digest = trained(model, range(6))
        assert attachment.state_dict()["world_size"] == 2
        assert attachment.state_dict()["rank"] == dist.get_rank() // 2
        attachment.close()
    dist.barrier()
    return digest


def test_a_model_on_some_of_the_ranks():
    first, outside, last = values_of(run_ranks(3, on_a_subgroup))
    assert first == last is not None and outside is None


# -------------------------------------------------------------------- some of the parameters


class Mixed(torch.nn.Module):
    """Two layers, the second in double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(30, 20), torch.nn.Linear(20, 5).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)).double()).square().sum()


def mixed() -> str:
    torch.manual_seed(0)
    module = Mixed()
    plain = DistributedDataParallel(copy.deepcopy(module))
    model = DistributedDataParallel(module)
    attachment = attach(model, EFSignSGD())
    for step in range(3):
        x = torch.randn(4, 30, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        for each in (plain, model):
            each.zero_grad()
            each(x).backward()
        assert torch.equal(module.second.weight.grad, plain.module.second.weight.grad)  # averaged exactly, as by DDP
        assert torch.equal(module.first.weight.grad, plain.module.first.weight.grad) == (step == 0)
    attachment.close()
    return digest_of(parameter.grad for parameter in module.parameters())


def test_a_model_with_gradients_that_cannot_be_compressed():
    assert len(set(values_of(run_ranks(2, mixed)))) == 1


def with_ignored_parameters() -> str:
    module = build("Mlp")
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["layers.2.weight"])
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)
    attachment = attach(model, BlockQuant())
    alone = copy.deepcopy(module)
    for step in range(4):
        batch = module.batch(step, dist.get_rank())
        model.zero_grad()
        alone.zero_grad()
        model(batch).backward()
        alone(batch).backward()
        assert torch.equal(module.layers[2].weight.grad, alone.layers[2].weight.grad)  # the gradient of this rank alone
    assert "layers.2.weight" not in [unit.parameter for unit in attachment.plan.units]
    attachment.close()
    return digest_of(p.grad for name, p in module.named_parameters() if name != "layers.2.weight")


def test_parameters_that_ddp_ignores_are_left_alone():
    assert len(set(values_of(run_ranks(2, with_ignored_parameters)))) == 1
