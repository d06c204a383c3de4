"""Loss scaling: all ranks notice a value that is not finite on one of them, and no residual keeps it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import gckernels
from ddp_models import attached
from gckernels import sync
from gckernels.sync.programs import PROGRAMS
from models import build
from ranks import run_ranks, values_of
from workloads import combinations, digest_of, one_of_each, topology, with_feedback, with_two_or_three_ranks

STEPS = 10
POISON = {
    0: ("layers.0.weight", 0, torch.inf),  # the first step is not compressed
    2: ("layers.0.weight", 0, torch.inf),
    3: ("layers.2.weight", -1, torch.nan),
    5: ("layers.4.weight", 0, -torch.inf),
    6: ("layers.2.bias", -1, torch.inf),  # this parameter is sent exactly
    8: ("layers.0.weight", -1, torch.nan),
}
"""For every poisoned step: the parameter, the rank (-1 is the last), and the value of one element of the rank's
gradient."""


def train_with_scaler(compressor: str, program: str, front: str = "hook") -> tuple[list[bool], str]:
    """Train and return which steps were skipped, and a digest of the parameters and the scale."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = build("Mlp")
    parameters = dict(module.named_parameters())
    poison: list[float] = []
    for name, parameter in parameters.items():
        parameter.register_hook(lambda grad, name=name: _poisoned(grad, poison if name == _target(step) else []))
    plan = with_feedback(
        sync.uniform_plan(
            parameters.items(),
            gckernels.from_spec(compressor),
            program=PROGRAMS[program],
            topology=topology(world_size),
            world_size=world_size,
        )
    )
    scaler = torch.amp.GradScaler(torch.get_default_device().type, init_scale=2.0**12, growth_interval=3)
    model, attachment = attached(front, module, plan, grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    skipped = []
    for step in range(STEPS):
        _, where, value = POISON.get(step, ("", 0, 0.0))
        poison[:] = [value] if step in POISON and rank == where % world_size else []
        before = digest_of(module.parameters())
        optimizer.zero_grad()
        scaler.scale(model(module.batch(step, rank))).backward()
        everywhere = [torch.isfinite(parameter.grad).all().item() for parameter in module.parameters()]
        assert all(everywhere) == (step not in POISON), f"step {step}"
        scaler.step(optimizer)
        scaler.update()
        skipped.append(digest_of(module.parameters()) == before)
        for kind, residuals in attachment.state_dict()["feedback"].items():
            for name, residual in residuals.items():
                assert residual.isfinite().all(), f"step {step}: the {kind} residual of {name}"
    attachment.close()
    return skipped, digest_of(module.parameters()) + f"/{scaler.get_scale()}"


def _target(step: int) -> str:
    return POISON[step][0] if step in POISON else ""


def _poisoned(grad: torch.Tensor, values: list[float]) -> torch.Tensor:
    grad = grad.clone()
    for value in values:
        grad.view(-1)[grad.numel() // 2] = value
    return grad


@pytest.mark.parametrize(
    ("world_size", "compressor", "program"), with_two_or_three_ranks(combinations(), quick=one_of_each(turn=1))
)
def test_all_ranks_skip_the_same_steps_and_go_on(world_size, compressor, program):
    found = values_of(run_ranks(world_size, train_with_scaler, compressor, program))
    assert {digest for _, digest in found} == {found[0][1]}
    for skipped, _ in found:
        assert [step for step in range(STEPS) if skipped[step]] == sorted(POISON)


@pytest.mark.parametrize(("compressor", "program"), [("EFSignSGD", "alltoall"), ("PowerSGD", "powersgd")])
def test_an_attached_module_skips_the_same_steps(compressor, program):
    of_ddp, of_module = (
        values_of(run_ranks(2, train_with_scaler, compressor, program, front)) for front in ("hook", "module")
    )
    assert of_ddp == of_module
