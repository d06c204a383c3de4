"""Residuals in 8 bits: a quarter of the memory, little is lost of any step, and a resumed job goes on bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import gckernels
from ddp_models import attached
from gckernels import sync
from gckernels.sync.programs import PROGRAMS, Program, ring
from models import build
from ranks import run_ranks, values_of
from workloads import digest_of, mass_of, summed, topology

STEPS, SAVED = 6, 3
CASES = [
    ("BlockQuant(bits=4)", "alltoall"),
    ("BlockQuant(bits=4, block=64)", "ring"),
    ("EFSignSGD", "allgather"),
    ("EFSignSGD(block=None)", "hierarchical"),
    ("OneBit", "parameter_server"),
]


def _program(name: str) -> Program:
    return ring(dist.get_world_size()) if name == "ring" else PROGRAMS[name]


class Kept:
    """A training with residuals of some bits.

    Attributes:
        given, got: sums of the mean gradients and of the averaged ones, by parameter.
        rounding: an upper bound of what rounding of residuals may have lost of any element.
    """

    def __init__(self, front: str, spec: str, program: str, bits: int, parameters: list[torch.Tensor] | None = None):
        module = build("Mlp")
        with torch.no_grad():
            for parameter, values in zip(module.parameters(), parameters or (), strict=False):
                parameter.copy_(values)
        where = topology(dist.get_world_size())
        plan = sync.uniform_plan(
            module, gckernels.from_spec(spec), program=_program(program), topology=where, world_size=where.world_size
        )
        self.module, (self.model, self.handle) = module, attached(front, module, plan, residual_bits=bits)
        self.parameters = dict(module.named_parameters())
        self.given = {name: torch.zeros_like(each).double() for name, each in self.parameters.items()}
        self.got = {name: torch.zeros_like(each).double() for name, each in self.parameters.items()}
        self.rounding = 0.0

    def train(self, steps: range) -> None:
        optimizer = torch.optim.SGD(self.module.parameters(), lr=0.05)
        for step in steps:
            batch = self.module.batch(step, dist.get_rank())
            mine = torch.autograd.grad(self.module(batch), list(self.parameters.values()))
            self.model(batch).backward()
            for (name, parameter), gradient in zip(self.parameters.items(), mine, strict=True):
                assert parameter.grad is not None
                self.given[name] += summed(gradient.double()) / dist.get_world_size()
                self.got[name] += parameter.grad.double()
            kept = self.handle.state_dict()["feedback"]
            largest = [float(each.abs().max()) for kind in kept.values() for each in kind.values() if each.numel()]
            self.rounding += sum(sorted(largest)[-2:]) / 127  # half a step for each of the residuals of an element
            optimizer.step()
            optimizer.zero_grad()

    def lost(self) -> float:
        """The largest part of any element that is neither in averages nor in residuals."""
        masses, worst = mass_of(self.handle), 0.0
        for name, given in self.given.items():
            missing = given.flatten() - self.got[name].flatten() - masses[name][-1]
            worst = max(worst, float(missing.abs().max()))
        return worst

    def digest(self) -> str:
        return digest_of(self.module.parameters())


def kept_in(front: str, bits: int, cases: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """Facts about a training of each case, and with 8 bits about one that was resumed in the middle of it."""
    found = []
    for spec, program in cases:
        whole = Kept(front, spec, program, bits)
        whole.train(range(SAVED))
        state, parameters = whole.handle.state_dict(), [each.detach().clone() for each in whole.module.parameters()]
        whole.train(range(SAVED, STEPS))
        facts = {
            "lost": whole.lost(),
            "rounding": summed(torch.tensor(whole.rounding)).item(),
            "nbytes": whole.handle.residual_nbytes(),
            "digest": whole.digest(),
        }
        whole.handle.change_plan(sync.uniform_plan(whole.module, "Identity", program="allreduce"))
        whole.train(range(STEPS, STEPS + 3))
        facts["lost, sent"] = whole.lost()
        facts["nbytes, sent"] = whole.handle.residual_nbytes()
        whole.handle.close()
        if bits == 8:
            again = Kept(front, spec, program, bits, parameters)
            again.handle.load_state_dict(state)
            again.train(range(SAVED, STEPS))
            facts["resumed"] = again.digest()
            again.handle.close()
        found.append(facts)
    return found


@pytest.mark.parametrize(
    ("front", "cases"),
    [
        ("ddp", CASES[::2]),
        ("module", CASES[1::2]),
        pytest.param("ddp", CASES[1::2], marks=pytest.mark.slow),
        pytest.param("module", CASES[::2], marks=pytest.mark.slow),
    ],
)
def test_a_quarter_of_the_memory_and_little_is_lost(front, cases):
    small = values_of(run_ranks(2, kept_in, front, 8, cases))
    large = values_of(run_ranks(2, kept_in, front, 32, cases))
    for case, mine, other, exact in zip(cases, *small, large[0], strict=True):
        assert mine["digest"] == other["digest"] == mine["resumed"] == other["resumed"], case
        assert mine["nbytes"] < 0.3 * exact["nbytes"], case
        assert 1e-6 < mine["lost"] <= mine["rounding"], case
        assert exact["lost"] < 2e-6 and exact["lost, sent"] < 2e-6, case
        assert mine["lost, sent"] <= mine["rounding"] and mine["nbytes, sent"] == 0, case


def refusals() -> list[str]:
    texts = []
    for compressor, bits in (("BlockQuant", 16), ("BlockQuant", True), ("TopK(ratio=0.1)", 8), ("QSGD", 8)):
        with pytest.raises(ValueError, match="residual_bits must be") as raised:
            sync.attach(build("Mlp"), compressor, residual_bits=bits)
        texts.append(str(raised.value))
    with pytest.raises(RuntimeError, match="residuals in 8 bits"):
        sync.attach(build("Mlp"), "BlockQuant", residual_bits=8 if dist.get_rank() else 32)
    return texts


def test_refusals():
    (texts, _) = values_of(run_ranks(2, refusals))
    assert texts[0] == "attach: residual_bits must be 32 or 8, got 16"
    assert texts[2].endswith("for a plan without residuals of element-wise quantisers such as BlockQuant, got 8")
