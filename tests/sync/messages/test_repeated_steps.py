"""On a GPU, every step of a message does the same, so that a CUDA graph can repeat it.

The back end for GPUs gets tensors of the CPU here, and its launches are recorded instead of run.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import gckernels
from gckernels.ops.powersgd import kernels
from gckernels.ops.powersgd import ops as powersgd_ops
from gckernels.sync import Topology, UnitPlan
from gckernels.sync.communication.communicators import DryCommunicators
from gckernels.sync.messages.encoded import EncodedMessage
from gckernels.sync.messages.lowrank import LowRankMessage
from gckernels.sync.messages.message import Message, Unit
from gckernels.sync.messages.seeds import Seeds
from gckernels.sync.programs import POWERSGD, Program
from gckernels.sync.programs.named import default_program
from gckernels.sync.resources.feedback import Feedback
from gckernels.sync.resources.memory_spaces import Places
from gckernels.toolkit.kernels.launch import Launch, record_launches
from helpers import Operations

PLACES = Places.of(torch.device("cpu"))
SHAPES = ((40, 30), (300, 20), (7, 3))
BEGIN, CLEAR = "aten.add_.Tensor", "aten.zero_.default"
# compressors, and the operations of a step besides its launches
SPECS = {
    "TernGrad": set(),
    "QSGD": set(),
    "RandomK": {CLEAR},
    "DGC": {CLEAR},
    "BlockQuant": set(),
    "PowerSGD": {"aten._foreach_copy_.default"},
}


def message_of(spec: str, seeds: Seeds, monkeypatch: pytest.MonkeyPatch) -> Message:
    """A message whose units are bound to the back end for GPUs."""
    method, topology, units = gckernels.from_spec(spec), Topology(4), []
    program: Program = default_program(method, topology.world_size)
    for index, shape in enumerate(SHAPES):
        plan = UnitPlan(f"p{index}", math.prod(shape), method.fit(shape), program, method.traits.needs_feedback)
        units.append(Unit(plan, torch.randn(plan.numel)))
    communicators: Any = DryCommunicators(0, topology, PLACES)
    if program == POWERSGD:
        monkeypatch.setattr(powersgd_ops, "back_end", lambda tensors: kernels)
        return LowRankMessage(units, communicators, Feedback(PLACES), seeds)
    monkeypatch.setattr(type(method), "host", type(method).triton)
    return EncodedMessage(units, communicators, Feedback(PLACES), seeds)


def done_in(step: int, message: Message, seeds: Seeds) -> tuple[list[Launch], list[tuple[Any, ...]]]:
    """The launches of a step, without its collectives, and torch's operations."""
    with record_launches() as launches, Operations() as found:
        seeds.begin(step)
        for stage in message.stages:
            if stage.spec.level is None:
                stage.work()
    return launches, found.calls


@pytest.mark.parametrize("spec", SPECS)
def test_a_step_does_the_same_as_the_step_before(spec, monkeypatch):
    """Launches have the same arguments, and torch's operations the same numbers: an addition begins the step."""
    seeds = Seeds(3, PLACES)
    message = message_of(spec, seeds, monkeypatch)
    for step in (1, 2):  # in the first, the memory that temporaries share grows
        done_in(step, message, seeds)
    launches, calls = done_in(3, message, seeds)
    assert done_in(4, message, seeds) == (launches, calls)
    reads = any(each is seeds.added() for launch in launches for each in (*launch.args, *launch.constexprs.values()))
    assert reads == gckernels.from_spec(spec).traits.stochastic
    names = [name for name, *_ in calls]
    assert names.count(BEGIN) >= 1 and set(names) <= {BEGIN} | SPECS[spec], names
