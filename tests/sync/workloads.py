"""Small models with the parameters that cause trouble, their batches, and an audited training run."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import hashlib
import itertools
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gckernels
from gckernels.method import Method
from gckernels.sync import (
    ALLREDUCE,
    ENCODED_ALLREDUCE,
    POWERSGD,
    PROGRAMS,
    AllReduce,
    Attachment,
    Encode,
    Plan,
    ProgramError,
    ReduceScatter,
    Topology,
    UnitPlan,
    attach,
    uniform_plan,
)
from gckernels.sync.feedback import ENCODINGS
from gckernels.sync.program import encodings, trace

SMALL_BUCKETS = 0.005  # MiB: the models below get several buckets


class Mlp(nn.Module):
    """Three layers; no dimension is a multiple of anything."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(23, 67), nn.Tanh(), nn.Linear(67, 41), nn.Tanh(), nn.Linear(41, 7))

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        return F.cross_entropy(self.layers(batch["x"]), batch["y"])

    @staticmethod
    def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        x = torch.randn(8, 23, generator=_generator(step, rank))
        return {"x": x.to(dtype), "y": x[:, :7].argmax(1)}


class Backwards(Mlp):
    """Layers without biases, the last one first: the order in which their gradients come."""

    def __init__(self) -> None:
        super().__init__()
        del self.layers
        self.third = nn.Linear(41, 7, bias=False)
        self.second = nn.Linear(67, 41, bias=False)
        self.first = nn.Linear(23, 67, bias=False)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        hidden = torch.tanh(self.second(torch.tanh(self.first(batch["x"]))))
        return F.cross_entropy(self.third(hidden), batch["y"])


class Zoo(nn.Module):
    """An embedding tied to the output, a channels-last convolution, a norm, biases, a scalar, a matrix of one element,
    one with no elements, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 24)
        self.conv = nn.Conv2d(5, 12, 3).to(memory_format=torch.channels_last)
        self.squeeze = nn.Linear(12 * 4, 24)
        self.norm = nn.LayerNorm(24)
        self.wide = nn.Linear(24, 130)
        self.narrow = nn.Linear(130, 24)
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.single = nn.Parameter(torch.ones(1, 1))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.output = nn.Linear(24, 19)
        self.output.weight = self.embedding.weight

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        seen = self.squeeze(torch.tanh(self.conv(batch["images"])).flatten(1)) * self.gain
        read = self.embedding(batch["tokens"]).mean(1) * self.single
        hidden = self.norm(seen + self.frozen(read)) + self.empty.sum()
        hidden = hidden + self.narrow(torch.tanh(self.wide(hidden)))
        return F.cross_entropy(self.output(hidden), batch["target"])

    @staticmethod
    def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        generator = _generator(step, rank)
        images = torch.randn(6, 5, 4, 4, generator=generator).to(dtype=dtype, memory_format=torch.channels_last)
        tokens = torch.randint(0, 19, (6, 5), generator=generator)
        return {"images": images, "tokens": tokens, "target": tokens[:, 0]}


class Branches(nn.Module):
    """Two branches and a layer that nothing uses. Which branches a rank uses depends on the step."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(23, 40)
        self.left = nn.Linear(40, 30)
        self.right = nn.Linear(40, 30)
        self.never = nn.Linear(40, 30)
        self.output = nn.Linear(30, 7)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(batch["x"]))
        used = [branch(hidden) for name, branch in (("left", self.left), ("right", self.right)) if batch[name]]
        return F.cross_entropy(self.output(sum(used, torch.zeros(30))), batch["y"])

    @staticmethod
    def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        batch = Mlp.batch(step, rank, dtype)
        match step % 5:
            case 0:  # everything everywhere
                batch |= {"left": True, "right": True}
            case 1:  # the right branch is unused on rank 0
                batch |= {"left": True, "right": rank != 0}
            case 2:  # and now on all ranks
                batch |= {"left": True, "right": False}
            case 3:  # each rank uses one of them
                batch |= {"left": rank % 2 == 0, "right": rank % 2 == 1}
            case 4:  # the left one is unused on all ranks
                batch |= {"left": False, "right": True}
        return batch


class Partly(Branches):
    """The same parameters of the same model are unused in every step, as a static graph must have it."""

    @staticmethod
    def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
        return Mlp.batch(step, rank, dtype) | {"left": True, "right": False}


MODELS: dict[str, type[nn.Module]] = {model.__name__: model for model in (Mlp, Backwards, Zoo, Branches, Partly)}


def build(model: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> nn.Module:
    """A model by name; the same seed gives the same parameters in every process."""
    torch.manual_seed(seed)
    return MODELS[model]().to(dtype)


def _generator(step: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * step + rank)


SPECS = (*sorted(gckernels.METHODS), "PowerSGD(one_sided=True)")
"""Every method at its default setting, and what another setting of one sends in another way."""


FEW = ("Cast16", "DGC", "EFSignSGD", "Identity")


def topology(world_size: int) -> Topology:
    """Two devices in each machine where that goes, one otherwise."""
    return Topology(world_size) if world_size % 2 else Topology(world_size // 2, 2)


def fits(compressor: Method, program: str, world_size: int = 2) -> bool:
    """Whether units of ``compressor`` can go through the program of that name."""
    try:
        trace(PROGRAMS[program], 100, torch.float32, compressor.fit((10, 10)), topology(world_size))
    except ProgramError:
        return False
    return True


def combinations(*programs: str) -> list[tuple[str, str]]:
    """``(compressor, program)`` by name: every method of the table with every program, or those named, that fits.

    What goes through ``allreduce`` is not encoded at all, so there it is Identity alone; and through the programs that
    are not the default of any method go a few.
    """
    only = {"allreduce": ("Identity",), "parameter_server": FEW, "hierarchical": FEW}
    return [
        (name, program)
        for name in SPECS
        for program in programs or PROGRAMS
        if fits(gckernels.from_spec(name), program) and name in only.get(program, SPECS)
    ]


def with_feedback(plan: Plan) -> Plan:
    """The plan with a residual for every unit that is compressed, also where training could do without."""
    units = [dataclasses.replace(unit, feedback=unit.compressor.name != "Identity") for unit in plan.units]
    return dataclasses.replace(plan, units=tuple(units))


MIXED = (
    ("BlockQuant", "alltoall"),
    ("EFSignSGD", "allgather"),
    ("Cast16", "encoded_allreduce"),
    ("Identity", "allreduce"),
    ("BlockQuant(bits=4)", "allgather"),
    ("Cast16(dtype='float16')", "encoded_allreduce"),
    ("Identity", "alltoall"),
    ("EFSignSGD(block=128)", "alltoall"),
)


def mixed_plan(parameters: dict[str, nn.Parameter]) -> Plan:
    """Neighbours differ in compressor and program; vectors are compressed as all else."""
    settings = itertools.cycle(MIXED)
    units = []
    for name, parameter in parameters.items():
        compressor, program = next(settings)
        units.append(UnitPlan(name, parameter.numel(), gckernels.from_spec(compressor), PROGRAMS[program], False))
    return Plan(tuple(units))


def trained(ddp_model: DistributedDataParallel) -> dict[str, nn.Parameter]:
    """The parameters that DDP synchronises, by name."""
    return {name: parameter for name, parameter in ddp_model.module.named_parameters() if parameter.requires_grad}


def digest_of(tensors: Any) -> str:
    """A hash of the bits of tensors, ``None`` included."""
    digest = hashlib.blake2b()
    for tensor in tensors:
        if tensor is None:
            digest.update(b"none")
        else:
            flat = tensor.detach().contiguous().view(-1)
            digest.update(flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b"empty")
    return digest.hexdigest()


def in_memory_order(values: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """``values`` as a vector, in the order in which ``parameter`` (and so its gradient and residual) lies in memory."""
    ordered = torch.empty_like(parameter, dtype=values.dtype).copy_(values)
    return ordered.as_strided((ordered.numel(),), (1,))


def summed(tensor: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks."""
    dist.all_reduce(tensor)
    return tensor


def largest(value: float) -> float:
    """The largest over the ranks."""
    tensor = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return tensor.item()


# -------------------------------------------------------------------- the audited training run


@dataclass(frozen=True)
class Run:
    """What to train and how.

    Attributes:
        compressor: as :func:`gckernels.from_spec` reads it, or ``"mixed"``: another one for every parameter, with
            a program of its own.
        program: by name, or ``"mixed"``.
        model: by name.
        options: of DDP.
        micro_batches: backward passes per step, all but the last under ``no_sync``.
    """

    compressor: str
    program: str
    model: str = "Mlp"
    dtype: torch.dtype = torch.float32
    steps: int = 12
    options: dict[str, Any] = field(default_factory=lambda: {"bucket_cap_mb": SMALL_BUCKETS})
    micro_batches: int = 1


def train(run: Run) -> str:
    """Train with compression alone; a digest of all gradients and of the parameters at the end."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    module = build(run.model, run.dtype)
    hooked = DistributedDataParallel(module, **run.options)
    compressor, program = gckernels.from_spec(run.compressor), PROGRAMS[run.program]
    attachment = attach(hooked, compressor, program=program, topology=topology(world_size), seed=world_size)
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
    """What :func:`audit` found.

    Attributes:
        digest: of all gradients of all steps and the parameters at the end.
        buckets: how many DDP has made.
        imbalance: the largest ``|applied + residual - contributed|`` of all parameters, in units of its bound.
        held: the same without the residual: what a compressor that forgets would have lost.
    """

    digest: str
    buckets: int
    imbalance: float
    held: float


def audit(run: Run) -> Audit:
    """Train with compression, compare every step with two models that have the same parameters and batches.

    One is wrapped in plain DDP, one is alone: what it gets is what this rank contributes. Checked at every step:

    - the first one is that of plain DDP, bit for bit;
    - later, so are the parameters that are sent exactly: bit for bit for two ranks, or where whole buckets are
      reduced as they are, else up to the order of addition;
    - ``.grad`` is None where plain DDP leaves it so.

    At the end: what all ranks contributed is what was applied plus what the residuals hold.
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
        plan = uniform_plan(
            parameters.items(), compressor, world_size, PROGRAMS[run.program], topology=topology(world_size)
        )
    attachment = attach(hooked, with_feedback(plan))
    units = {unit.parameter: unit for unit in plan.units}
    as_ddp = all(unit.program == ALLREDUCE for unit in plan.units)
    optimizer = torch.optim.SGD(hooked.parameters(), lr=0.05, momentum=0.5)
    ledger = _Ledger(run, units, parameters, attachment)
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
    imbalance, held = ledger.close()
    buckets = len(attachment._buckets)
    attachment.close()
    return Audit(digest_of(module.parameters()) + "".join(digests), buckets, imbalance, held)


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
        # with two ranks there is one addition, and the factor 1/2 is exact: no order, nothing to round differently
        # (but for subnormal numbers, which fp16 gradients do get to)
        assert torch.equal(got, expected), f"{what}: not the bits of plain DDP"
        return
    # Both are sums of W terms in some order, times a rounded 1/W: at most W + 1 relative errors of u on any term's way,
    # u = eps/2 of the type that is added (and, for the result of the hook, one more rounding into the gradient's type).
    # They differ by at most twice that of the mean magnitude; below the normal numbers a rounding is absolute.
    magnitude = torch.zeros_like(got, dtype=torch.float64) if mine is None else mine.double().abs()
    info = torch.finfo(got.dtype)
    bound = 2 * (world_size + 2) * info.eps / 2 * (summed(magnitude) / world_size + info.tiny)
    excess = ((got.double() - expected.double()).abs() - bound).max() if got.numel() else 0.0
    assert excess <= 0, f"{what}: differs from plain DDP by {excess} more than the order of addition explains"


def balances(compressor: Method) -> bool:
    """What ranks contribute is what is applied, on average, plus what their residuals hold."""
    return compressor.conserves and compressor.averages


class _Ledger:
    """Balances what ranks contribute against what is applied, in fp64."""

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
        """The largest imbalance of all parameters, and that without residuals, in units of the bound."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        feedback = self._attachment.state_dict()["feedback"]
        imbalance = held = 0.0
        for name, parameter in self._parameters.items():
            unit = self._units[name]
            if Encode() in unit.program and not balances(unit.compressor):
                continue
            kept = torch.zeros(parameter.numel(), dtype=torch.float64)
            program = ENCODED_ALLREDUCE if unit.program == POWERSGD else unit.program
            encoded = encodings(program, unit.numel, topology(world_size), rank, unit.root)
            for kind, encoding in zip(ENCODINGS, encoded, strict=False):
                if name in feedback[kind]:
                    kept[encoding.start : encoding.stop] += encoding.weight * feedback[kind][name]
            summed(kept)
            contributed = summed(self._contributed[name]) / world_size
            missing = in_memory_order(contributed - self._applied[name], parameter)
            bound = self._bound(name)
            if parameter.numel():
                imbalance = max(imbalance, (missing - kept).abs().max().item() / bound)
                held = max(held, missing.abs().max().item() / bound)
        return imbalance, held

    def _bound(self, name: str) -> float:
        """What roundings may amount to in one element, over all steps and accumulations.

        With u = 2**-24, P the largest magnitude of gradient plus residual that is encoded, and D that of anything that
        is decoded (D <= 2 P, as the new residual P - D is bounded by the largest residual seen), a step rounds:

        - each worker's ``grad + residual`` and ``values - decoded``: u (P + P) on each rank, so also in their mean;
        - the sum of W payloads, times 1/W: (W - 1) additions and the factor's and product's rounding: u (W + 1) D;
        - the second encoding the same way: u (D + P + P), decoded without loss;
        - the gradient's own type once more: u_grad D;
        - W - 1 additions in the payload's type when an allreduce adds payloads, and the scaling with 1/W and back
          around the cast (3 roundings): u_payload (W - 1) D + 3 u D. What the cast takes away is in the residual;
        - in the gradient's type, W - 1 additions and a factor when a reduce-scatter adds gradients: u_grad W D.

        Adding up micro-batches can differ between DDP and the twin by one rounding in the gradient's type each.
        """
        world_size, run = dist.get_world_size(), self._run
        u, u_grad = 2.0**-24, torch.finfo(run.dtype).eps / 2
        encoded = largest(self._largest_grad[name]) + largest(self._largest_residual[name])
        decoded = 2 * encoded
        per_step = u * (4 * encoded + (world_size + 5) * decoded) + u_grad * decoded * run.micro_batches
        unit = self._units[name]
        if AllReduce() in unit.program:
            added = run.dtype if unit.program == ALLREDUCE else unit.compressor.payload_dtype
            per_step += torch.finfo(added).eps / 2 * (world_size - 1) * decoded
        if any(isinstance(step, ReduceScatter) for step in unit.program):
            per_step += u_grad * world_size * decoded
        # the smallest normal number: products below it round absolutely
        return run.steps * (per_step + torch.finfo(run.dtype).tiny)
