"""Training runs with every step checked against plain DDP, and with a check that no gradient is lost."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gckernels
from gckernels import sync
from gckernels.compressor import Compressor
from gckernels.sync import Attachment, UnitPlan, attach
from gckernels.sync.programs import ALLREDUCE, ENCODED_ALLREDUCE, POWERSGD, PROGRAMS, AllReduce, Encode, ReduceScatter
from gckernels.sync.programs.residuals import ENCODINGS, encoded_regions
from models import SMALL_BUCKETS, build
from workloads import (
    digest_of,
    in_memory_order,
    largest,
    mixed_plan,
    summed,
    topology,
    trained,
    with_feedback,
)


@dataclass(frozen=True)
class Run:
    """Settings of a training run.

    Attributes:
        compressor: a spec as :func:`gckernels.from_spec` reads it, or ``"mixed"`` for a different compressor and
            program for every parameter.
        program: name of the program, or ``"mixed"``.
        model: name of the model.
        dtype: dtype of parameters and batches.
        steps: number of steps.
        options: keyword arguments of DDP.
        micro_batches: backward passes per step, all but the last under ``no_sync``.
    """

    compressor: str
    program: str
    model: str = "Mlp"
    dtype: torch.dtype = torch.float32
    steps: int = 5
    options: dict[str, Any] = field(default_factory=lambda: {"bucket_cap_mb": SMALL_BUCKETS})
    micro_batches: int = 1


def train(run: Run) -> str:
    """Train with compression, without checks; returns a digest of all gradients and of the final parameters."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = build(run.model, run.dtype)
    hooked = DistributedDataParallel(module, **run.options)
    compressor, program = gckernels.from_spec(run.compressor), PROGRAMS[run.program]
    attachment = attach(
        hooked, sync.uniform_plan(hooked, compressor, program=program, topology=topology(world_size)), seed=world_size
    )
    optimizer = torch.optim.SGD(hooked.parameters(), lr=0.05, momentum=0.5)
    digests = []
    for step in range(run.steps):
        _backward(hooked, [module.batch(step, rank, run.dtype)])
        digests.append(digest_of(parameter.grad for parameter in module.parameters()))
        optimizer.step()
    attachment.close()
    return digest_of(module.parameters()) + "".join(digests)


@dataclass(frozen=True)
class Audit:
    """Results of :func:`audit`.

    Attributes:
        digest: digest of the gradients of all steps and the final parameters.
        buckets: number of DDP's buckets.
        imbalance: the largest ``|applied + residual - contributed|`` of all parameters, in units of its bound.
        withheld: the same without the residual: the loss without error feedback.
    """

    digest: str
    buckets: int
    imbalance: float
    withheld: float


def audit(run: Run) -> Audit:
    """Train with compression, and compare every step with two models that have the same parameters and batches.

    One of them is wrapped in plain DDP. The other is not synchronised; its gradients are this rank's contribution.
    Three things are checked:

    - all gradients of the first step equal those of plain DDP bit for bit;
    - in later steps, gradients of parameters that are sent exactly equal those of plain DDP: bit for bit with two ranks
      or if whole buckets are reduced unchanged, otherwise up to the order of addition;
    - ``.grad`` is ``None`` exactly if it is ``None`` with plain DDP.

    The result measures whether the contributions of all ranks equal the applied gradients plus the residuals.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = build(run.model, run.dtype)
    alone, plain_module = copy.deepcopy(module), copy.deepcopy(module)
    plain = DistributedDataParallel(plain_module, **run.options)
    hooked = DistributedDataParallel(module, **run.options)
    parameters = trained(hooked)
    if run.compressor == "mixed":
        plan = mixed_plan(parameters)
    else:
        compressor = gckernels.from_spec(run.compressor)
        plan = sync.uniform_plan(
            parameters.items(),
            compressor,
            program=PROGRAMS[run.program],
            topology=topology(world_size),
            world_size=world_size,
        )
    attachment = attach(hooked, with_feedback(plan), start_step=1)
    units = {unit.parameter: unit for unit in plan.units}
    as_ddp = all(unit.program == ALLREDUCE for unit in plan.units)
    optimizer = torch.optim.SGD(hooked.parameters(), lr=0.05, momentum=0.5)
    ledger = Ledger(run, units, parameters, attachment)
    digests = []
    for step in range(run.steps):
        for twin in (alone, plain_module):
            twin.load_state_dict(module.state_dict())
        batches = [module.batch(step + run.steps * micro, rank, run.dtype) for micro in range(run.micro_batches)]
        for model in (alone, plain, hooked):
            _backward(model, batches)
        got = {name: parameter.grad for name, parameter in module.named_parameters()}
        expected = {name: parameter.grad for name, parameter in plain_module.named_parameters()}
        mine = {name: parameter.grad for name, parameter in alone.named_parameters()}
        for name, unit in units.items():
            exact = step == 0 or unit.compressor.name == "Identity" or unit.program == ALLREDUCE
            _compare(f"step {step}, {name}", got[name], expected[name], mine[name], exact, step == 0 or as_ddp)
        ledger.add({name: mine[name] for name in parameters}, {name: got[name] for name in parameters})
        digests.append(digest_of(got.values()))
        optimizer.step()
    imbalance, withheld = ledger.close()
    buckets = len(attachment._frontend._buckets)
    attachment.close()
    return Audit(digest_of(module.parameters()) + "".join(digests), buckets, imbalance, withheld)


def _backward(model: nn.Module, batches: list[dict[str, Any]]) -> None:
    model.zero_grad(set_to_none=True)
    for batch in batches:
        only_local = isinstance(model, DistributedDataParallel) and batch is not batches[-1]
        with model.no_sync() if only_local else contextlib.nullcontext():
            model(batch).backward()


def _compare(
    what: str,
    got: torch.Tensor | None,
    expected: torch.Tensor | None,
    mine: torch.Tensor | None,
    exact: bool,
    bitwise: bool,
) -> None:
    assert (got is None) == (expected is None), f"{what}: {got} is not {expected} as with plain DDP"
    if got is None or expected is None:
        return
    assert got.dtype == expected.dtype and got.stride() == expected.stride(), what
    if not exact:
        return
    world_size = dist.get_world_size()
    if bitwise or (world_size == 2 and got.dtype != torch.float16):
        # two ranks need one addition, which has no order, and the factor 1/2 is exact, except for subnormal numbers,
        # which occur in fp16 gradients
        assert torch.equal(got, expected), f"{what}: not the bits of plain DDP"
        return
    # Both are sums of W terms in some order, times a rounded 1/W: every term passes at most W + 1 roundings with
    # relative error u = eps/2 of the added dtype; the hook's result is rounded once more to the gradient's dtype. The
    # sums differ by at most twice that error of the mean magnitude. Roundings of subnormal numbers are absolute.
    magnitude = torch.zeros_like(got, dtype=torch.float64) if mine is None else mine.double().abs()
    info = torch.finfo(got.dtype)
    bound = 2 * (world_size + 2) * info.eps / 2 * (summed(magnitude) / world_size + info.tiny)
    excess = ((got.double() - expected.double()).abs() - bound).max() if got.numel() else 0.0
    assert excess <= 0, f"{what}: differs from plain DDP by {excess} more than the order of addition explains"


def balances(compressor: Compressor) -> bool:
    """Whether the ranks' contributions equal, on average, the applied gradients plus the residuals."""
    return compressor.traits.conserves and compressor.traits.averages


class Ledger:
    """Sums, in fp64, of the contributed and of the applied gradients of every parameter."""

    def __init__(
        self, run: Run, units: dict[str, UnitPlan], parameters: dict[str, nn.Parameter], attachment: Attachment
    ) -> None:
        self._run, self._units = run, units
        self._parameters = parameters
        self._attachment = attachment
        self._contributed = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
        self._applied = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
        self._largest_grad = dict.fromkeys(parameters, 0.0)
        self._largest_residual = dict.fromkeys(parameters, 0.0)

    def add(self, mine: dict[str, torch.Tensor | None], applied: dict[str, torch.Tensor | None]) -> None:
        feedback = self._attachment.state_dict()["feedback"]
        for name in self._parameters:
            for total, grad in ((self._contributed, mine[name]), (self._applied, applied[name])):
                if grad is not None:
                    total[name] += grad
            grad = mine[name]
            if grad is not None and grad.numel():
                self._largest_grad[name] = max(self._largest_grad[name], grad.abs().max().item())
            for kind in ("worker", "shard"):
                residual = feedback[kind].get(name)
                if residual is not None and residual.numel():
                    assert residual.isfinite().all(), f"{kind} residual of {name}"
                    self._largest_residual[name] = max(self._largest_residual[name], residual.abs().max().item())

    def close(self) -> tuple[float, float]:
        """``(imbalance, withheld)`` as in :class:`Audit`."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        feedback = self._attachment.state_dict()["feedback"]
        imbalance = withheld = 0.0
        for name, parameter in self._parameters.items():
            unit = self._units[name]
            if Encode() in unit.program and not balances(unit.compressor):
                continue
            kept = torch.zeros(parameter.numel(), dtype=torch.float64)
            program = ENCODED_ALLREDUCE if unit.program == POWERSGD else unit.program
            encoded = encoded_regions(program, unit.numel, topology(world_size), rank, unit.root)
            for kind, encoding in zip(ENCODINGS, encoded, strict=False):
                if name in feedback[kind]:
                    kept[encoding.start : encoding.stop] += encoding.weight * feedback[kind][name]
            summed(kept)
            contributed = summed(self._contributed[name]) / world_size
            missing = in_memory_order(contributed - self._applied[name], parameter)
            bound = self._bound(name)
            if parameter.numel():
                imbalance = max(imbalance, (missing - kept).abs().max().item() / bound)
                withheld = max(withheld, missing.abs().max().item() / bound)
        return imbalance, withheld

    def _bound(self, name: str) -> float:
        """Bound of the rounding errors of one element over all steps.

        Let u = 2**-24, P the largest magnitude of gradient plus residual before encoding, and D the largest magnitude
        after decoding. D <= 2 P, because the new residual P - D is bounded by the largest residual. A step rounds:

        - each worker's ``grad + residual`` and ``values - decoded``: u (P + P) on each rank, so also in their mean;
        - the sum of W payloads, times 1/W: W - 1 additions and two roundings for factor and product: u (W + 1) D;
        - the same in the second encoding: u (D + P + P), decoded without loss;
        - the result to the gradient's dtype: u_grad D;
        - if an allreduce adds payloads, W - 1 additions in the payload's dtype and 3 roundings for scaling by 1/W and
          back around the cast: u_payload (W - 1) D + 3 u D. The error of the cast itself is in the residual;
        - if a reduce-scatter adds gradients, W - 1 additions and a factor in the gradient's dtype: u_grad W D.

        The sum of micro-batches can differ between DDP and the twin by one rounding in the gradient's dtype each.
        """
        world_size, run = dist.get_world_size(), self._run
        u, u_grad = 2.0**-24, torch.finfo(run.dtype).eps / 2
        encoded = largest(self._largest_grad[name]) + largest(self._largest_residual[name])
        decoded = 2 * encoded
        per_step = u * (4 * encoded + (world_size + 5) * decoded) + u_grad * decoded * run.micro_batches
        unit = self._units[name]
        if AllReduce() in unit.program:
            added = run.dtype if unit.program == ALLREDUCE else unit.compressor.traits.payload_dtype
            per_step += torch.finfo(added).eps / 2 * (world_size - 1) * decoded
        if any(isinstance(step, ReduceScatter) for step in unit.program):
            per_step += u_grad * world_size * decoded
        # plus the smallest normal number: smaller products have absolute rounding errors
        return run.steps * (per_step + torch.finfo(run.dtype).tiny)
