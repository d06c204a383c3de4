"""Recordings of trainings on one rank and on two: the training stays the same bit for bit, and the trace is right."""

from __future__ import annotations

import contextlib
import copy
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

from gckernels import sync
from gckernels.ops import BlockQuant, Cast16, TopK
from gckernels.sync.accuracy.accuracy import candidates_by_default
from gckernels.sync.accuracy.errors import relative_errors
from gckernels.sync.programs.topology import balanced
from gckernels.sync.traces.model_trace import ModelTrace
from gckernels.sync.traces.traced_tensors import Role
from models import MODELS, SMALL_BUCKETS, build
from ranks import run_ranks, values_of
from workloads import digest_of, thinned


class Tied(nn.Module):
    """A small transformer whose last layer has the weight of its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(19, 24)
        self.block = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True)
        self.output = nn.Linear(24, 19, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        logits = self.output(self.block(self.embedding(batch["tokens"])))
        return {"loss": F.cross_entropy(logits.flatten(0, 1), batch["tokens"].flatten())}

    batch = staticmethod(MODELS["Zoo"].batch)


class Norms(MODELS["Mlp"]):
    """The network of three layers with a batch norm, whose statistics DDP sends from rank 0 before every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(1, nn.BatchNorm1d(67))


MODELS |= {"Tied": Tied, "Norms": Norms}
COMPRESSORS = (BlockQuant(), TopK(ratio=0.1), Cast16())


@dataclass(frozen=True)
class Run:
    """A training: some steps before the recording of 3, and some after it."""

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 1
    set_to_none: bool = True
    steps: int = 9
    ddp: bool = True
    warmup: int = 2


def loss_of(model, batch):
    output = model(batch)
    return output["loss"] if isinstance(output, dict) else output


def backward(model, run, step, rank):
    for micro in range(run.micro_batches):
        last = micro == run.micro_batches - 1
        local = isinstance(model, DistributedDataParallel) and not last
        with model.no_sync() if local else contextlib.nullcontext():
            batch = MODELS[run.model].batch(step + 100 * micro, rank)
            loss_of(model, batch).backward()


def train(run, recording_of=None):
    """Train; returns digests of the gradients of every step and of the final parameters, and the recording."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    module = build(run.model)
    model = DistributedDataParallel(module, bucket_cap_mb=SMALL_BUCKETS, **run.options) if run.ddp else module
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.5)
    recording = recording_of(model, run.warmup) if recording_of else None
    digests = []
    for step in range(run.steps):
        optimizer.zero_grad(set_to_none=run.set_to_none)
        backward(model, run, step, rank)
        digests.append(digest_of(parameter.grad for parameter in module.parameters()))
        optimizer.step()
    return [*digests, digest_of(module.parameters()), digest_of(module.buffers())], recording


def record(model, warmup):
    return sync.trace_model(model, steps=3, warmup=warmup, compressors=COMPRESSORS)


def compared(run):
    """The trace of a recorded training, and whether every step equals the unrecorded one's."""
    plain, _ = train(run)
    of_others = set(optimizers._global_optimizer_post_hooks)  # attachments of earlier tests in this process
    digests, recording = train(run, record)
    assert recording.done
    hooks: list[Any] = sorted(set(optimizers._global_optimizer_post_hooks) - of_others)
    hooks += [each for p in recording._recorder._parameters.values() for each in p._post_accumulate_grad_hooks or ()]
    assert not hooks, hooks
    return digests == plain, recording.trace


RUNS = {
    "mlp": Run("Mlp"),
    "zeroed gradients": Run("Mlp", set_to_none=False),
    "tied": Run("Tied"),
    "frozen": Run("Zoo"),
    "accumulation": Run("Mlp", micro_batches=3),
    "views": Run("Tied", {"gradient_as_bucket_view": True}),
    "views of zeros": Run("Tied", {"gradient_as_bucket_view": True}, set_to_none=False),
    "unused": Run("Branches", {"find_unused_parameters": True}),
    "unused after they were used": Run("Branches", {"find_unused_parameters": True}, warmup=3),
    "unused, views": Run("Branches", {"find_unused_parameters": True, "gradient_as_bucket_view": True}, warmup=3),
    "unused in some passes": Run("Branches", {"find_unused_parameters": True}, micro_batches=2),
    "buffers": Run("Norms"),
    "static graph": Run("Partly", {"static_graph": True}),
}


def check_trace(trace, run):
    module = build(run.model)
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert {tensor.name for tensor in trace.tensors} == set(named)
    times = [tensor.ready_s for tensor in trace.tensors]
    assert times == sorted(times) and times[0] >= 0 and times[-1] == trace.backward_s > 0
    assert trace.forward_s > 0 and trace.optimizer_s > 0
    for tensor in trace.tensors:
        parameter = named[tensor.name]
        assert (tensor.numel, math.prod(tensor.shape)) == (parameter.numel(), parameter.numel())
        is_used = tensor.norm is not None
        assert set(tensor.errors) == ({str(method) for method in COMPRESSORS} if is_used else set())
        assert all(0 <= error <= 1 for error in tensor.errors.values())
    if run.ddp:
        assert sorted(name for bucket in trace.buckets for name in bucket) == sorted(named)
        assert len(trace.buckets) > 1
    assert ModelTrace.from_text(trace.to_text(), "recorded") == trace


@pytest.mark.parametrize("name", thinned([(name,) for name in RUNS], 2))
def test_a_recorded_training_is_the_same_on_two_ranks(name):
    run = RUNS[name]
    (same, trace), (also, other) = values_of(run_ranks(2, compared, run))
    assert same and also, "gradients of a step, or the parameters, differ"
    assert trace == other
    check_trace(trace, run)


def test_a_recorded_training_is_the_same_on_three_ranks():
    """The order of addition is DDP's, because its buckets are the same."""
    assert all(same for same, _ in values_of(run_ranks(3, compared, RUNS["mlp"])))


def local_norms():
    """The norms that a recorded step of DDP has, and those of gradients that are never averaged."""
    rank = dist.get_rank()
    model, alone = DistributedDataParallel(build("Mlp")), build("Mlp")
    recording = sync.trace_model(model, 1, warmup=2, compressors=[])
    for step in range(3):
        batch = MODELS["Mlp"].batch(step, rank)
        for each in (model, alone):
            each.zero_grad()
            each(batch).backward()
    owners = balanced({name: p.numel() for name, p in alone.named_parameters()}, 2)
    mine = {name: p.grad.norm().item() for name, p in alone.named_parameters() if owners[name] == rank}
    return mine, {tensor.name: tensor.norm for tensor in recording.trace.tensors}


def test_ranks_share_their_own_gradients():
    (first, trace), (second, _) = values_of(run_ranks(2, local_norms))
    assert first and second and (first | second).keys() == trace.keys()
    for name, norm in (first | second).items():
        assert trace[name] == pytest.approx(norm)


@pytest.mark.parametrize("ddp", [True, False])
def test_one_rank(ddp):
    run = Run("Tied", ddp=ddp)
    ((same, trace),) = values_of(run_ranks(1, compared, run))
    assert same
    check_trace(trace, run)


def test_without_a_process_group():
    run = Run("Mlp", ddp=False)
    same, trace = compared(run)
    assert same
    check_trace(trace, run)
    assert not trace.buckets


# -------------------------------------------------------------------- roles, errors


def recorded(model, batches, **arguments) -> ModelTrace:
    recording = sync.trace_model(model, len(batches), warmup=0, **arguments)
    for batch in batches:
        model.zero_grad()
        loss_of(model, batch).backward()
    return recording.trace


def test_roles():
    def roles(name):
        trace = recorded(build(name), [MODELS[name].batch(0, 0)], compressors=[])
        return {tensor.name: tensor.role for tensor in trace.tensors}

    assert {name: role for name, role in roles("Mlp").items() if role is not Role.VECTOR} == {
        "layers.0.weight": Role.WEIGHT,
        "layers.2.weight": Role.WEIGHT,
        "layers.4.weight": Role.OUTPUT,
    }
    assert roles("Backwards")["third.weight"] is Role.OUTPUT, "the last in forward is registered first"
    tied = roles("Tied")
    assert tied["embedding.weight"] is Role.EMBEDDING and Role.OUTPUT not in tied.values()
    assert tied["block.norm1.weight"] is tied["block.linear1.bias"] is Role.VECTOR


def test_errors_are_those_of_a_direct_computation():
    model = build("Tied")
    methods = candidates_by_default()
    batches = [MODELS["Tied"].batch(step, 0) for step in range(6)]
    trace = recorded(copy.deepcopy(model), batches)
    gradients = {name: [] for name, _ in model.named_parameters()}
    for batch in batches[2:]:
        model.zero_grad()
        loss_of(model, batch).backward()
        for name, parameter in model.named_parameters():
            gradients[name].append(parameter.grad.clone().view(-1))
    for tensor in trace.tensors:
        vectors = gradients[tensor.name]
        assert tensor.errors == relative_errors(methods, vectors, tensor.shape)
        assert tensor.norm == pytest.approx(sum(each.norm().item() for each in vectors) / 4)
    by_name = {tensor.name: tensor for tensor in trace.tensors}
    assert any(spec.startswith("PowerSGD") for spec in by_name["block.linear1.weight"].errors)
    # without feedback, an error is that of the compressor alone
    weight = gradients["block.linear1.weight"]
    squares = [((each.bfloat16().float() - each).norm() / each.norm()).item() ** 2 for each in weight]
    expected = math.sqrt(sum(squares) / len(squares))
    assert by_name["block.linear1.weight"].errors[str(Cast16())] == pytest.approx(expected, rel=1e-5)


def test_gradients_that_are_not_finite_are_left_out():
    model = nn.Linear(8, 8, bias=False)
    recording = sync.trace_model(model, 3, warmup=0, compressors=["BlockQuant"])
    for factor in (1.0, math.inf, 1.0):
        model.zero_grad()
        (model(torch.ones(2, 8)).square().sum() * factor).backward()
    (tensor,) = recording.trace.tensors
    assert math.isfinite(tensor.norm) and 0 < tensor.errors[str(BlockQuant())] < 0.1
