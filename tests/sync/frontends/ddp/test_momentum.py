"""DGC attached to a model: warm-up, checkpoints, two phases, and warnings about an optimizer with momentum."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer

from gckernels import DGC, TopK, sync
from gckernels.sync import attach, exempt_vectors
from gckernels.sync.programs import PROGRAMS
from models import SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from workloads import digest_of, topology

START, WARMUP, SAVED, STEPS = 2, 8, 5, 13


def _model(seed: int = 0) -> tuple[torch.nn.Module, DistributedDataParallel]:
    module = build("Mlp", seed=seed)
    return module, DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS)


def _optimizer(hooked: DistributedDataParallel) -> torch.optim.Optimizer:
    """The optimizer of ``docs/howto/dgc.md``: only exempt parameters have momentum."""
    named = list(hooked.module.named_parameters())
    return torch.optim.SGD(
        [
            {"params": [p for name, p in named if not exempt_vectors(name, p)], "momentum": 0.0},
            {"params": [p for name, p in named if exempt_vectors(name, p)], "momentum": 0.9},
        ],
        lr=0.05,
    )


# -------------------------------------------------------------------- training


def trained(program: str, folder: str, first: int) -> dict[str, Any]:
    """Train with a warm-up, from the beginning or from the saved file; return digests, residual sizes and the bytes of
    every step."""
    rank, file = dist.get_rank(), Path(folder, f"{program}-{dist.get_rank()}.pt")
    module, hooked = _model(seed=first)
    optimizer = _optimizer(hooked)
    compressor = DGC(ratio=0.01, warmup_steps=WARMUP, clip=1.0, workers=dist.get_world_size())
    attachment = attach(
        hooked,
        sync.uniform_plan(hooked, compressor, program=PROGRAMS[program], topology=topology(dist.get_world_size())),
        start_step=START,
        seed=3,
    )
    if first:
        state = torch.load(file, weights_only=True)
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        attachment.load_state_dict(state["attachment"])
    sent, total, grads = [], 0.0, []
    for step in range(first, STEPS):
        if step == SAVED and not first:
            parts = {"model": module, "optimizer": optimizer, "attachment": attachment}
            torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        optimizer.zero_grad()
        hooked(module.batch(step, rank)).backward()
        steps = max(0, step + 1 - max(first, START))
        now = attachment.sent_nbytes_per_step() * steps
        sent.append(round(now - total))
        total = now
        grads.append(digest_of(parameter.grad for parameter in module.parameters()))
        optimizer.step()
    state = attachment.state_dict()
    sizes = {kind: {name: t.numel() for name, t in tensors.items()} for kind, tensors in state["feedback"].items()}
    residuals = [t for tensors in state["feedback"].values() for _, t in sorted(tensors.items())]
    attachment.close()
    return {"bits": digest_of(module.parameters()), "own": digest_of(residuals), "grads": grads, "sent": sent} | sizes


@pytest.mark.parametrize("program", ["allgather", "alltoall"])
def test_warm_up_and_checkpoints(program, tmp_path):
    """Every step has the same bits on all ranks, the warm-up stages come at their steps, and the states are saved. A
    job that is resumed in the middle of the warm-up goes on with the same bits."""
    gone_on = values_of(run_ranks(2, trained, program, str(tmp_path), 0))
    again = values_of(run_ranks(2, trained, program, str(tmp_path), SAVED))
    assert gone_on[0]["bits"] == gone_on[1]["bits"] and gone_on[0]["grads"] == gone_on[1]["grads"]
    for before, after in zip(gone_on, again, strict=True):
        assert (after["bits"], after["own"]) == (before["bits"], before["own"])
        assert after["grads"] == before["grads"][SAVED:]
        assert after["sent"] == before["sent"][SAVED:]
        # the weights have 1541, 2747 and 287 elements; the worker holds u and v, the shard holds v of a half, which is
        # a multiple of 16
        numel = {"layers.0.weight": 1541, "layers.2.weight": 2747, "layers.4.weight": 287}
        assert before["worker"] == {name: 2 * n for name, n in numel.items()}
        assert before["shard"].keys() == (numel.keys() if program == "alltoall" else set())
    sent = gone_on[0]["sent"]
    assert sent[:START] == [0] * START
    stages = [sent[START + step] for step in range(STEPS - START)]
    assert stages[0] == stages[1] > stages[2] == stages[3] > stages[4] == stages[5] > stages[6] == stages[7]
    assert stages[7] >= stages[8] == stages[-1]
    assert stages[0] > 4 * stages[8]  # there are five times the entries, and each index takes fewer bits


def one_parameter(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """``(gradient of this rank, applied gradient)`` of the largest weight, for every step."""
    module, hooked = _model()
    attachment = attach(hooked, sync.uniform_plan(hooked, DGC(ratio=0.02), program=PROGRAMS["allgather"]))
    twin, found = build("Mlp"), []
    for step in range(steps):
        module.zero_grad()
        twin.zero_grad()
        twin(module.batch(step, dist.get_rank())).backward()
        hooked(module.batch(step, dist.get_rank())).backward()
        found.append((twin.layers[2].weight.grad.flatten().clone(), module.layers[2].weight.grad.flatten().clone()))
    attachment.close()
    return found


def test_what_is_applied_is_the_mean_of_what_the_ranks_send():
    """The applied gradient is the mean of entries of every rank's v, computed here; the uncompressed first step is left
    out."""
    ranks = values_of(run_ranks(2, one_parameter, 6))
    states = [(torch.zeros(2747), torch.zeros(2747)) for _ in ranks]
    for step in range(1, 6):
        applied = ranks[0][step][1]
        for rank, found in enumerate(ranks):
            u, v = states[rank]
            u = u * 0.9 + found[step][0]
            states[rank] = u, v + u
        # Each rank sent at most 55 entries, roughly the largest of v. Where one rank sent, half of its v was applied;
        # where both did, half of the sum.
        v0, v1 = (v for _, v in states)
        options = torch.stack([v0 / 2, v1 / 2, (v0 + v1) / 2])
        nonzero = applied != 0
        assert 0 < int(nonzero.sum()) <= 2 * 55
        closest = (options - applied).abs().min(0)
        assert (closest.values[nonzero] <= 2.0**-22 * options.abs().amax(0)[nonzero]).all()
        for rank, (u, v) in enumerate(states):
            mask = nonzero & ((closest.indices == rank) | (closest.indices == 2))
            states[rank] = u.masked_fill(mask, 0.0), v.masked_fill(mask, 0.0)


# -------------------------------------------------------------------- the optimizer's momentum

OPTIMIZERS = {
    "sgd": (lambda parameters: torch.optim.SGD(parameters, lr=0.1), False),
    "momentum": (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), True),
    "adam": (torch.optim.Adam, True),
    "adam_without_first_moment": (lambda parameters: torch.optim.Adam(parameters, betas=(0.0, 0.999)), False),
    "rmsprop": (torch.optim.RMSprop, False),
}


def warned(name: str) -> dict[str, list[str]]:
    """The warnings of two steps of an optimizer, for several settings."""
    make, found = OPTIMIZERS[name][0], {}
    of_others = set(torch_optimizer._global_optimizer_pre_hooks)  # attachments of earlier tests in this process
    for setting, compressor in (("DGC", DGC()), ("plain", DGC(momentum=0.0)), ("TopK", TopK())):
        module, hooked = _model()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            attachment = attach(hooked, compressor)
            other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1, momentum=0.9)
            other.step()  # none of its parameters is the model's
            optimizer = make(hooked.parameters())
            for step in range(2):
                hooked(module.batch(step, dist.get_rank())).backward()
                optimizer.step()
            attachment.close()
        found[setting] = [str(one.message) for one in caught if "gckernels" in str(one.message)]
        assert set(torch_optimizer._global_optimizer_pre_hooks) <= of_others
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_second_momentum_is_warned_of_once(name):
    for found in values_of(run_ranks(2, warned, name)):
        assert found["plain"] == found["TopK"] == []
        assert len(found["DGC"]) == OPTIMIZERS[name][1]
        assert all("DGC applies a momentum" in text and "momentum=0" in text for text in found["DGC"])


def groups_and_ends() -> list[str]:
    """The documented parameter groups cause no warning, and neither does a model that was closed or deleted."""
    of_others = set(torch_optimizer._global_optimizer_pre_hooks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module, hooked = _model()
        attachment = attach(hooked, DGC())
        optimizer = _optimizer(hooked)
        hooked(module.batch(0, dist.get_rank())).backward()
        optimizer.step()
        attachment.close()

        module, hooked = _model()
        attach(hooked, DGC()).close()
        torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9).step()
    assert set(torch_optimizer._global_optimizer_pre_hooks) <= of_others
    return [str(one.message) for one in caught if "gckernels" in str(one.message)]


def test_no_warning_for_what_is_exempt_and_none_after_the_end():
    assert values_of(run_ranks(2, groups_and_ends)) == [[], []]
