"""Thousands of steps with random units, compressors, programs and delays: memory stays flat and ranks stay equal."""

from __future__ import annotations

import gc
import random
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gckernels
from gckernels.codec import Codec
from gckernels.sync import Topology, UnitPlan
from gckernels.sync.communication.communicators import Communicators
from gckernels.sync.engine.engine import Engine
from gckernels.sync.messages.encoded import EncodedMessage
from gckernels.sync.messages.message import DenseMessage, Message, Unit
from gckernels.sync.messages.seeds import Seeds
from gckernels.sync.programs import Level, Place, ProgramError, default_program, enumerate_programs, ring
from gckernels.sync.programs.rules import Site
from gckernels.sync.programs.sizes import sizes_of
from gckernels.sync.resources.feedback import Feedback
from gckernels.sync.resources.lane_kinds import ThreadLane
from gckernels.sync.resources.lanes import DeviceLanes
from gckernels.sync.resources.memory_spaces import Places
from ranks import run_ranks, values_of
from workloads import digest_of

TOPOLOGY = Topology(2, 2)
STEPS, MESSAGES, IN_A_STEP = 2000, 40, 5
DELAY_S = 0.0005
SPECS = [name for name, cls in sorted(gckernels.COMPRESSORS.items()) if issubclass(cls, Codec)]


def resident_nbytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def make_messages(
    choose: random.Random, communicators: Communicators, feedback: Feedback, seeds: Seeds
) -> tuple[list[Message], list[torch.Tensor]]:
    """Messages of one to four units each, identical on all ranks, and the gradients in them."""
    programs = [*enumerate_programs(TOPOLOGY), *[ring(4)] * 20]
    messages: list[Message] = []
    grads: list[torch.Tensor] = []
    while len(messages) < MESSAGES:
        compressor = gckernels.from_spec(choose.choice(SPECS))
        own = default_program(compressor, TOPOLOGY.world_size)
        program = choose.choice(programs) if choose.random() < 0.8 else own
        numels = [choose.choice([1, 100, choose.randrange(20_000)]) for _ in range(choose.randint(1, 4))]
        try:
            sizes_of(program, 100, torch.float32, compressor, TOPOLOGY)
        except ProgramError:
            continue
        pieces = [torch.zeros(numel) for numel in numels]
        if len(program) == 1:
            messages.append(DenseMessage(pieces[0], ["dense"], communicators))
            pieces = pieces[:1]
        else:
            units = [
                Unit(UnitPlan(f"{len(messages)}/{index}", piece.numel(), compressor, program, True, root=1), piece)
                for index, piece in enumerate(pieces)
            ]
            channel = choose.randrange(2)
            messages.append(EncodedMessage(units, communicators, feedback, seeds, channel))
        grads += pieces
    return messages, grads


def soaked(steps: int, slow: int | None) -> tuple[str, float, bool]:
    """A digest of all values at the end, the growth of memory in bytes, and whether all values are finite."""
    rank, places = dist.get_rank(), Places.of(torch.device("cpu"))
    choose = random.Random(0)  # the same choices on all ranks
    sites = {Site(phase, level, Place.DEVICE, exchanges=True) for phase in range(4) for level in Level}
    communicators = Communicators(dist.group.WORLD, places, TOPOLOGY, sites, channels=2)
    engine = Engine(DeviceLanes(places.device), communicators.phases)
    feedback, seeds = Feedback(places), Seeds(0, places)
    messages, grads = make_messages(choose, communicators, feedback, seeds)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ThreadLane, "submit", delayed(ThreadLane.submit, random.Random(rank), rank == slow))
        before = 0
        for step in range(steps):
            for grad in grads:
                grad.normal_()
            seeds.begin(step)
            tokens = [engine.submit(each, step, [engine.lanes.here()]) for each in choose.sample(messages, IN_A_STEP)]
            for token in tokens:
                token.join()
            assert engine.lanes.error is None, engine.lanes.error
            if step == steps // 4:
                before = resident_nbytes()
    growth = resident_nbytes() - before
    found = [residual for kind in feedback.state_dict().values() for residual in kind.values()]
    finite = all(bool(each.isfinite().all()) for each in found)
    # the last synchronised values are the same on all ranks
    for message in messages:
        engine.submit(message, steps, [engine.lanes.here()]).join()
    engine.lanes.close()
    communicators.close()
    return digest_of(grads), growth, finite


def delayed(submit, choose: random.Random, is_slow: bool):
    """A ``submit`` whose work sometimes begins late, with fifty times the delay on a slow rank."""

    def submit_delayed(lane, work, after=(), failed=None):
        delay_s = DELAY_S * (50 if is_slow else 1) * choose.random() if choose.random() < 0.1 else 0.0

        def late() -> None:
            time.sleep(delay_s)
            work()

        return submit(lane, late, after, failed)

    return submit_delayed


@pytest.mark.host_only("its messages are on the CPU")
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("steps", "slow"), [(STEPS, None), (STEPS // 4, 2)], ids=["random delays", "one rank slow"])
def test_soak(steps, slow):
    found = values_of(run_ranks(4, soaked, steps, slow, timeout_s=1100))
    assert len({digest for digest, _, _ in found}) == 1
    assert all(finite for _, _, finite in found)
    # allocators keep a few pages; a leak of one small tensor per message and step would be 40 MB
    assert all(growth < 4e6 for _, growth, _ in found), [growth for _, growth, _ in found]
