"""Training on a GPU: several ranks share one card, and each behaves as if it had a host of its own."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import gckernels
from gckernels import BlockQuant, EFSignSGD, sync
from gckernels.sync import attach
from gckernels.sync.programs import AllGather, AllToAll, Decode, Encode, Place, Program
from harness.simulated_device import build
from ranks import Device, ranks_on, run_ranks, values_of
from workloads import digest_of, nccl_group

WIDTH = 2048  # wide enough that synchronising takes longer than enqueuing
ON_DEVICE: Program = (Encode(), AllToAll(), Decode(), Encode(), AllGather(), Decode())
ON_HOST: Program = (Encode(), AllToAll(), Decode(Place.HOST), Encode(Place.HOST), AllGather(), Decode())


def gradients(front: str, program: Program) -> list[tuple[str, str, str]]:
    """For every step: the digests of the gradients read in stream order after backward, of the final gradients, and of
    the parameters."""
    device, group = torch.device("cuda", 0), nccl_group()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(device)
    if front == "attach":
        model = DistributedDataParallel(model, device_ids=[0], process_group=group)
        executed = attach(model, sync.uniform_plan(model, BlockQuant(), program=program))
    else:
        executed = attach(
            model,
            sync.uniform_plan(model, BlockQuant(), program=program, world_size=dist.get_world_size(group)),
            process_group=group,
        )
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.01)
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    found = []
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(16, WIDTH, generator=generator, device=device)).square().mean().backward()
        at_once = [parameter.grad.clone() for parameter in parameters]
        torch.cuda.synchronize()
        later = [parameter.grad.cpu() for parameter in parameters]
        optimizer.step()
        digests = ([grad.cpu() for grad in at_once], later, [parameter.detach().cpu() for parameter in parameters])
        found.append(tuple(digest_of(each) for each in digests))
    executed.close()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("program", [ON_DEVICE, ON_HOST], ids=["device", "host"])
@pytest.mark.parametrize("front", ["attach", "module"])
def test_gradients_are_the_means_when_backward_returns(front, program):
    ranks = values_of(run_ranks(2, gradients, front, program, timeout_s=300.0, fresh=True))
    assert ranks[0] == ranks[1]
    assert all(at_once == later for at_once, later, _ in ranks[0])


class Given(nn.Module):
    """A model whose gradients are the batches: the same bits on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.zeros(shape) for shape in ((40, 25), (64, 64), (7, 10)))

    def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([(mine * given).sum() for mine, given in zip(self.matrices, batch, strict=True)]).sum()


SPECS = ("BlockQuant", "TopK(ratio=0.1)")


FRONTS = ("attach", "module", "sharded", "updates")


def digests_of_training(front: str, device: torch.device) -> list[str]:
    """For every compressor: the digests of each step's gradients and parameters, and of the residuals at the end.

    Batches are small integers, whose sums are exact in any order.
    """
    group = nccl_group() if device.type == "cuda" else dist.group.WORLD
    generator, found = torch.Generator().manual_seed(dist.get_rank()), []
    for spec in SPECS:
        model: nn.Module = Given().to(device)
        compressor = gckernels.from_spec(spec)
        shapes = [each.shape for each in model.parameters()]
        if front == "attach":
            model = DistributedDataParallel(model, process_group=group)
        elif front == "sharded":
            fully_shard(model, mesh=DeviceMesh.from_group(group, device.type))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if front == "updates":
            executed = sync.attach(
                model, sync.Updates(optimizer, compressor, every=2, scale_steps=False), process_group=group
            )
        else:
            settings = {"process_group": group} if front == "module" else {}
            world_size = dist.get_world_size(group)
            executed = attach(model, sync.uniform_plan(model, compressor, world_size=world_size), **settings)
        assert {unit.compressor for unit in executed.plan.units} == {compressor}
        for _ in range(4):
            model.zero_grad()
            given = [8.0 * torch.randint(-4, 5, shape, generator=generator) for shape in shapes]
            model([each.to(device) for each in given]).backward()
            optimizer.step()
            for tensors in ([each.grad for each in model.parameters()], model.parameters()):
                found.append(digest_of(local(each).cpu() for each in tensors))
        kept = executed.state_dict()["feedback"]["worker"]
        found.append(digest_of(kept[name].cpu() for name in sorted(kept)))
        executed.close()
    return found


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


CPU = torch.device("cpu")


def test_the_module_gives_the_gradients_of_the_hook():
    hook, attachment = (values_of(run_ranks(2, digests_of_training, front, CPU)) for front in ("attach", "module"))
    assert hook == attachment


@pytest.mark.host_only("it names its devices itself")
@pytest.mark.parametrize("front", FRONTS)
def test_trainings_that_a_device_repeats_run_on_a_cpu(front):
    first, second = values_of(run_ranks(2, digests_of_training, front, CPU))
    assert first != second  # residuals and shards are each rank's own
    assert len(set(first)) > len(first) / 2


@pytest.mark.gpu
@pytest.mark.parametrize("front", FRONTS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_a_device_gives_the_digests_of_the_cpu(world_size, front):
    found = run_ranks(world_size, digests_of_training, front, torch.device("cuda", 0), timeout_s=300.0, fresh=True)
    assert values_of(found) == values_of(run_ranks(world_size, digests_of_training, front, CPU))


def on_the_simulated_device(front: str) -> list[str]:
    return digests_of_training(front, torch.device("sim", 0))


@pytest.mark.host_only("it names its devices itself")
@pytest.mark.skipif(build.reason_against() is not None, reason=str(build.reason_against()))
@pytest.mark.parametrize("front", FRONTS)
def test_the_simulated_device_gives_the_digests_of_the_cpu(front):
    """The rehearsal of the test before: the same training, on a device, without a card."""
    with ranks_on(Device("sim")):
        found = values_of(run_ranks(2, on_the_simulated_device, front))
    assert found == values_of(run_ranks(2, digests_of_training, front, CPU))


def digests_under_the_sanitizer(front: str, device: torch.device) -> list[str]:
    """The digests of a training, while torch looks for accesses from streams that do not wait for each other.

    It sees the operations of this thread and of backward. Its environment variable would start CUDA before ranks fork.
    """
    from torch.cuda import _sanitizer  # begins to trace CUDA

    current = SimpleNamespace(cuda_stream=0)
    asked = mock.patch.object(torch.cuda, "current_stream", lambda device=None: current)
    with asked if device.type == "cpu" else contextlib.nullcontext():
        _sanitizer.enable_cuda_sanitizer()
        found = digests_of_training(front, device)
        _sanitizer.cuda_sanitizer.disable()
    return found


@pytest.mark.host_only("it names its devices itself")
@pytest.mark.parametrize("device", [CPU, pytest.param(torch.device("cuda", 0), marks=pytest.mark.gpu)], ids=str)
@pytest.mark.parametrize("front", ["attach", "sharded"])
def test_the_sanitizer_of_torch_finds_no_race(front, device):
    """On a CPU it has nothing to look for, and changes nothing."""
    found = run_ranks(2, digests_under_the_sanitizer, front, device, timeout_s=300.0, fresh=True)
    assert values_of(found) == values_of(run_ranks(2, digests_of_training, front, CPU))


def backwards_that_do_not_wait() -> list[float]:
    """Train under a gradient scaler and return its scales. After the warm-up steps, a backward in which the host waits
    for the device raises an error."""
    device, group = torch.device("cuda", 0), nccl_group()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).to(device)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=2)
    settings = {"grad_scaler": scaler, "find_unused_parameters": True, "process_group": group}
    attachment = attach(model, sync.uniform_plan(model, EFSignSGD(), program=ON_DEVICE), **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
    scales = []
    for step in range(8):
        optimizer.zero_grad(set_to_none=False)
        loss = scaler.scale(model(torch.randn(16, 64, device=device)).square().mean())
        loss = loss * torch.inf if step == 5 else loss
        before = attachment.state_dict()["feedback"]["worker"]
        try:
            torch.cuda.set_sync_debug_mode("error" if step >= 3 else "default")
            loss.backward()
            scaler.step(optimizer)
            scaler.update()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        after = attachment.state_dict()["feedback"]["worker"]
        if step > 1:
            assert all(torch.equal(after[name], before[name]) == (step == 5) for name in after), step
        scales.append(scaler.get_scale())
    attachment.close()
    return scales


@pytest.mark.gpu
def test_nothing_waits_for_the_device():
    first, second = values_of(run_ranks(2, backwards_that_do_not_wait, timeout_s=300.0, fresh=True))
    assert first == second and len(set(first)) > 2
