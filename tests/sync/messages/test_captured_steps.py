"""A step of a message, from gradients to their means, can be captured as a CUDA graph and repeated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

import gckernels
from gckernels.sync import Topology, UnitPlan
from gckernels.sync.communication.communicators import Communicators
from gckernels.sync.messages.encoded import EncodedMessage
from gckernels.sync.messages.message import Unit
from gckernels.sync.messages.seeds import Seeds
from gckernels.sync.programs import ALLTOALL
from gckernels.sync.programs.rules import sites
from gckernels.sync.resources.feedback import Feedback
from gckernels.sync.resources.memory_spaces import Places
from ranks import run_ranks, values_of
from workloads import digest_of, nccl_group

SPECS = ("BlockQuant", "TopK(ratio=0.1)", "TernGrad")  # the last one draws random numbers
NUMELS = (5, 1000, 70)
FIRST, STEPS = 10, 3
ON_CPU, ON_GPU = Places.of(torch.device("cpu")), Places.of(torch.device("cuda", 0))


def repeated_steps(places: Places) -> list[list[str]]:
    """For every compressor: the digests of the means in three steps, which are replays on a GPU.

    Gradients are small integers, whose sums are exact in any order. A replay that drew the random numbers of another
    step would give other means than its own step.
    """
    group = nccl_group() if places == ON_GPU else dist.group.WORLD
    communicators = Communicators(group, places, Topology(dist.get_world_size()), set(sites(ALLTOALL)))
    generator = torch.Generator().manual_seed(dist.get_rank())
    found, graphs = [], []
    for spec in SPECS:
        grads = [torch.zeros(numel, device=places.device) for numel in NUMELS]
        units = [
            Unit(UnitPlan(f"p{index}", grad.numel(), gckernels.from_spec(spec), ALLTOALL, True), grad)
            for index, grad in enumerate(grads)
        ]
        seeds = Seeds(0, places)
        message = EncodedMessage(units, communicators, Feedback(places), seeds)

        def step(number: int, message: EncodedMessage = message, seeds: Seeds = seeds) -> None:
            seeds.begin(number)
            for stage in message.stages:
                stage.work()

        step(1)  # compiles and connects; zeros leave no residual
        replay = captured(step, graphs) if places == ON_GPU else None
        seeds.begin(FIRST - 1)
        digests = []
        for number in range(FIRST, FIRST + STEPS):
            for grad in grads:
                grad.copy_(8.0 * torch.randint(-4, 5, grad.shape, generator=generator))
            if replay is None:
                step(number)
            else:
                replay()
            digests.append(digest_of(grad.cpu() for grad in grads))
        found.append(digests)
    del replay
    graphs.clear()  # before the communicators that they use
    communicators.close()
    return found


def captured(step: Callable[[int], None], graphs: list[torch.cuda.CUDAGraph]) -> Callable[[], None]:
    """A replay of ``step``, whose graph is added to ``graphs``."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(2)  # memory for temporaries belongs to a stream
    torch.cuda.synchronize()
    graphs.append(torch.cuda.CUDAGraph())
    with torch.cuda.graph(graphs[-1], stream=stream, capture_error_mode="thread_local"):  # NCCL has its own threads
        step(3)
    return graphs[-1].replay


def test_a_step_is_the_work_of_its_stages():
    first, second = values_of(run_ranks(2, repeated_steps, ON_CPU))
    assert first == second and len({digest for digests in first for digest in digests}) == STEPS * len(SPECS)


@pytest.mark.gpu
def test_a_captured_step_on_a_device_gives_the_means_of_the_cpu():
    found = values_of(run_ranks(2, repeated_steps, ON_GPU, timeout_s=100.0, fresh=True))
    assert found == values_of(run_ranks(2, repeated_steps, ON_CPU))
