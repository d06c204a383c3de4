"""Training on a GPU: several ranks on one card, each as if it had a host of its own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks, values_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from workloads import digest_of, nccl_group

from gckernels import BlockQuant
from gckernels.sync import AllGather, AllToAll, Decode, Encode, Place, Program, Synchronizer, attach

WIDTH = 2048  # so that synchronising takes longer than enqueuing
ON_DEVICE: Program = (Encode(), AllToAll(), Decode(), Encode(), AllGather(), Decode())
ON_HOST: Program = (Encode(), AllToAll(), Decode(Place.HOST), Encode(Place.HOST), AllGather(), Decode())


def gradients(way: str, program: Program) -> list[tuple[str, str, str]]:
    """Of every step: digests of the gradients as they were when backward returned, in the order of the stream; of those
    after everything had ended; and of the parameters."""
    device, group = torch.device("cuda", 0), nccl_group()
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(device)
    if way == "attach":
        model = DistributedDataParallel(model, device_ids=[0], process_group=group)
        executed = attach(model, BlockQuant(), program=program)
    else:
        executed = Synchronizer(model, BlockQuant(), program=program, process_group=group)
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
@pytest.mark.parametrize("way", ["attach", "Synchronizer"])
def test_gradients_are_the_means_when_backward_returns(way, program):
    ranks = values_of(run_ranks(2, gradients, way, program, timeout_s=300.0, fresh=True))
    assert ranks[0] == ranks[1]
    assert all(at_once == later for at_once, later, _ in ranks[0])
