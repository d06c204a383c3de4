"""Attach compression to a DistributedDataParallel model.

:func:`attach` registers a communication hook. DDP calls it with each bucket of gradients as soon as backward has
filled it; the hook queues the bucket's messages on the engine's lanes and returns a future, so encoding, both phases
of communication and decoding overlap with the rest of backward and with each other.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

import gckernels
from gckernels.compressor import Compressor
from gckernels.method import Method

from .communicators import Communicators, exchange_text
from .encoded import EncodedMessage
from .engine import Engine
from .feedback import ENCODINGS, KINDS, Feedback
from .lowrank import LowRankMessage
from .message import DenseMessage, Message, Unit
from .optimizers import warn_of_momentum
from .plan import Plan, UnitPlan, exempt_vectors, uniform_plan
from .program import encodings
from .steps import AllReduce, Collective, Level, Program, describe
from .strategies import ALLREDUCE, ENCODED_ALLREDUCE, POWERSGD
from .topology import Topology

Exempt = Callable[[str, torch.nn.Parameter], bool]

_attached: weakref.WeakKeyDictionary[DistributedDataParallel, Attachment] = weakref.WeakKeyDictionary()


def attach(
    ddp_model: DistributedDataParallel,
    compressor_or_plan: Method | Plan,
    *,
    program: Program | None = None,
    exempt: Exempt = exempt_vectors,
    topology: Topology | None = None,
    seed: int = 0,
    start_step: int = 0,
) -> Attachment:
    """Compress the gradients of a DDP model from the next backward on. Every rank calls it, with the same arguments.

    Gradients are averaged as DDP does it and are bitwise identical on all ranks. The first iteration, in which DDP
    still has all gradients in one bucket, is averaged without compression; so is everything with one rank.

    Args:
        ddp_model: the wrapped model, with no communication hook registered yet.
        compressor_or_plan: one compressor for every parameter that is not exempt, or a plan that names all of them. If
            it applies a momentum (``DGC``) and the optimizer does, too, the first step warns of it.
        program: how units are sent; by default :func:`~gckernels.sync.program.default_program`. Not with a plan.
        exempt: ``(name, parameter) -> bool``, the parameters that are sent exactly; by default those with fewer than
            two dimensions. Not with a plan.
        topology: which ranks are on one machine, for programs that say so. Not with a plan.
        seed: of the stochastic compressors.
        start_step: the first step that is compressed; those before it are averaged exactly. Gradients change fastest
            when a training begins, and an optimizer such as Adam then learns their magnitudes: a tenth of the steps, or
            less in a long training, is what aggressive compressors with error feedback want.

    Returns:
        The attachment: residuals to checkpoint, bytes sent, ``close``.

    Raises:
        TypeError, ValueError, PlanError: an argument is not valid on this rank.
        RuntimeError: not valid on another rank, or not the same on all of them. Every rank raises.
    """
    if not dist.is_initialized():
        raise RuntimeError("attach: torch.distributed is not initialised; call init_process_group first")
    problem: Exception | None = None
    plan, summary = Plan(()), ""
    try:
        plan, summary = _checked_plan(ddp_model, compressor_or_plan, program, exempt, topology)
        if type(seed) is not int:
            raise TypeError(f"attach: seed must be an int, got {type(seed).__name__}")
        if type(start_step) is not int or start_step < 0:
            raise ValueError(f"attach: start_step must be an int from 0 up, got {start_step!r}")
    except Exception as error:  # from the caller's exempt: any
        problem = error
    # a rank with an argument that is not valid takes part in the exchange all the same: the others are waiting in it
    is_ddp = isinstance(ddp_model, DistributedDataParallel)
    group = ddp_model.process_group if is_ddp else dist.distributed_c10d._get_default_group()
    device = _device(ddp_model)
    settings = (
        f"{summary}, seed {seed}, start_step {start_step}, gckernels {gckernels.__version__}, plan {plan.fingerprint()}"
    )
    _agree(group, device, problem, settings)
    attachment = Attachment(ddp_model, plan, group, device, seed, start_step)
    ddp_model.register_comm_hook(None, attachment._hook)
    _attached[ddp_model] = attachment
    # threads end with the model; not at exit, where a lane may be waiting for a rank that is gone
    weakref.finalize(ddp_model, attachment.close).atexit = False
    return attachment


def _checked_plan(
    ddp_model: Any, compressor_or_plan: Any, program: Program | None, exempt: Exempt, topology: Topology | None
) -> tuple[Plan, str]:
    """The plan, and what to call it in a message to other ranks."""
    if not isinstance(ddp_model, DistributedDataParallel):
        raise TypeError(f"attach: ddp_model must be a DistributedDataParallel model, got {type(ddp_model).__name__}")
    if ddp_model in _attached:
        raise ValueError("attach: ddp_model has a gckernels attachment already; a model can have one")
    # not from its list of hooks, which lacks the built-in ones
    if ddp_model._get_ddp_logging_data().get("comm_hook"):  # type: ignore[no-untyped-call]
        raise ValueError("attach: ddp_model has a communication hook already; DDP can have one")
    for name, module in ddp_model.module.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            raise ValueError(f"attach: ddp_model has sparse gradients ({name}), which cannot be compressed")
    parameters = _parameters(ddp_model)
    world_size = dist.get_world_size(ddp_model.process_group)
    if isinstance(compressor_or_plan, Method):
        plan = uniform_plan(parameters.items(), compressor_or_plan, world_size, program, exempt, topology)
        programs = sorted({describe(unit.program) for unit in plan.units})
        summary = f"{compressor_or_plan} through {' and '.join(programs)}"
    elif isinstance(compressor_or_plan, Plan):
        if program is not None or exempt is not exempt_vectors or topology is not None:
            raise ValueError("attach: program, exempt and topology belong to a compressor; a plan has its own")
        plan, summary = compressor_or_plan, "a plan"
    else:
        given = type(compressor_or_plan).__name__
        raise TypeError(f"attach: compressor_or_plan must be a Compressor or a Plan, got {given}")
    plan.check(parameters.items(), world_size)
    return plan, summary


def _parameters(ddp_model: DistributedDataParallel) -> dict[str, torch.nn.Parameter]:
    """The parameters that DDP synchronises, by their name in the wrapped module."""
    ignored = ddp_model.parameters_to_ignore
    named = ddp_model.module.named_parameters()
    return {name: parameter for name, parameter in named if parameter.requires_grad and name not in ignored}


def _device(ddp_model: Any) -> torch.device:
    """Where the gradients are; for what is not a model, where the default group can talk."""
    if isinstance(ddp_model, torch.nn.Module):
        for parameter in ddp_model.parameters():
            return parameter.device
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _agree(group: dist.ProcessGroup, device: torch.device, problem: Exception | None, settings: str) -> None:
    """Raise on every rank unless all ranks are without a problem and have the same settings."""
    texts = exchange_text(group, device, f"problem: {problem}" if problem else f"settings: {settings}")
    if problem is not None:
        raise problem
    for rank, text in enumerate(texts):
        if text.startswith("problem: "):
            raise RuntimeError(f"attach: rank {rank} could not attach: {text.removeprefix('problem: ')}")
    if len(set(texts)) > 1:
        listed = "\n  ".join(f"rank {rank}: {text.removeprefix('settings: ')}" for rank, text in enumerate(texts))
        raise RuntimeError(f"attach: the ranks do not have the same settings:\n  {listed}")


class Attachment:
    """What :func:`attach` has attached: the hook, the engine behind it, the residuals."""

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        plan: Plan,
        group: dist.ProcessGroup,
        device: torch.device,
        seed: int,
        start_step: int,
    ) -> None:
        self.plan = plan
        self._device = device
        self._seed = seed
        self._keep_unused = ddp_model.find_unused_parameters or ddp_model.static_graph
        self._units: dict[int, list[UnitPlan]] = {}
        for unit, parameter in _by_parameter(plan, ddp_model):
            self._units.setdefault(id(parameter), []).append(unit)
        self._feedback = Feedback(device)
        self._rank, self._world_size = dist.get_rank(group), dist.get_world_size(group)
        self._topology = plan.topology_of(self._world_size)
        self._engine: Engine | None = None
        if self._world_size > 1:
            phases = {(0, Level.FLAT)}
            for unit in plan.units:
                collectives = [step for step in unit.program if isinstance(step, Collective)]
                phases |= {(phase, step.level) for phase, step in enumerate(collectives)}
            self._engine = Engine(device, Communicators(group, device, self._topology, phases, plan.channels))
        self._buckets: dict[int, tuple[Any, list[Message]]] = {}
        self._changes = sorted({first for unit in plan.units for first, _ in unit.compressor.stages})
        self._step = 0
        # in the very first step one bucket has all gradients, and DDP will rebuild it: there is nothing to overlap with
        self._start_step = max(start_step, 1)
        self._closed = False
        planned = _by_parameter(plan, ddp_model)
        moving = [(u.compressor.name, p) for u, p in planned if u.compressor.applies_momentum and u.feedback]
        self._watch = warn_of_momentum([p for _, p in moving], moving[0][0]) if moving else None
        self._sent_nbytes = 0.0
        self._sent_steps = 0

    # ---------------------------------------------------------------- the hook

    # DDP compares a hook's annotations with its types and refuses postponed ones, which are text: so none here
    def _hook(self, _, bucket):  # type: ignore[no-untyped-def]
        return self._synchronise(bucket)

    def _synchronise(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        on_cuda = self._device.type == "cuda"
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[self._device] if on_cuda else None)
        if self._closed:
            return _fail(future, "the attachment of this model is closed, wrap the module in DDP anew")
        engine, step = self._engine, self._step
        self._step += bucket.is_last()
        if engine is None:
            future.set_result(buffer)
            return future
        if (error := engine.error) is not None:
            return _fail(future, f"synchronisation failed before: {_shown(error)}")
        if step < self._start_step:
            messages: list[Message] = [DenseMessage(buffer, engine.communicators)]
        else:
            messages = self._messages(bucket, engine, step - self._start_step)
            self._sent_nbytes += sum(message.sent_nbytes for message in messages)
            self._sent_steps += bucket.is_last()
        start = engine.lanes.here()
        tokens = [engine.submit(message, step, start) for message in messages]
        engine.finish(
            tokens,
            lambda: future.set_result(buffer),
            lambda error: _fail(future, f"synchronisation failed: {_shown(error)}"),
        )
        return future

    def _messages(self, bucket: GradBucket, engine: Engine, step: int) -> list[Message]:
        """The bucket's messages in a compressed step; built when DDP shows a bucket for the first time or has rebuilt
        it, and when a compressor comes to another stage."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        stage = bisect.bisect(self._changes, step)
        key = (buffer.data_ptr(), stage, tuple(id(parameter) for parameter in parameters))
        known = self._buckets.get(bucket.index())
        if known is None or known[0] != key:
            units = []
            for parameter, grad in zip(parameters, bucket.gradients(), strict=True):
                first = grad.storage_offset() - buffer.storage_offset()
                for unit in self._units[id(parameter)]:
                    start = first + (unit.start or 0)
                    units.append(Unit(unit.at(step), buffer[start : start + unit.numel]))
            known = self._buckets[bucket.index()] = (key, self._build(units, buffer, engine))
        return known[1]

    def _build(self, units: list[Unit], buffer: torch.Tensor, engine: Engine) -> list[Message]:
        """Group units into messages: neighbours that are reduced in place, and one per program, root and payload dtype.
        A part of a parameter is a message by itself, so that those of one parameter are on their way together."""
        encoded: dict[Any, list[Unit]] = {}
        messages: list[Message] = []
        first = last = 0  # the stretch of neighbours so far
        for unit in sorted(units, key=lambda unit: unit.grad.storage_offset()):
            if unit.plan.program == ALLREDUCE:
                start = int(unit.grad.storage_offset() - buffer.storage_offset())
                if start != last:
                    messages += [DenseMessage(buffer[first:last], engine.communicators)] if last > first else []
                    first = start
                last = start + unit.grad.numel()
            else:
                reduced = any(isinstance(step, AllReduce) for step in unit.plan.program)
                dtype = unit.plan.compressor.payload_dtype if reduced else None
                part = None if unit.plan.start is None else unit.plan.key
                encoded.setdefault((unit.plan.program, unit.plan.root, dtype, part), []).append(unit)
        messages += [DenseMessage(buffer[first:last], engine.communicators)] if last > first else []
        for number, ((program, *_), group) in enumerate(encoded.items()):
            arguments = (program, group, engine.communicators, self._feedback, self._seed, self._keep_unused)
            if program != POWERSGD and all(isinstance(unit.plan.compressor, Compressor) for unit in group):
                messages.append(EncodedMessage(*arguments, channel=number % self.plan.channels))
            else:
                messages.append(LowRankMessage(*arguments))
        return messages

    # ---------------------------------------------------------------- for the user

    def sent_nbytes_per_step(self) -> float:
        """Mean bytes that this rank has put on the wire per compressed step; 0 before the first."""
        return self._sent_nbytes / self._sent_steps if self._sent_steps else 0.0

    def residual_nbytes(self) -> int:
        """Bytes that residuals, and the factors of low-rank methods, take on this rank."""
        return self._feedback.nbytes()

    def state_dict(self) -> dict[str, Any]:
        """What has to be saved, by every rank for itself, for a resumed job to go on exactly: tensors and ints."""
        return {
            "step": self._step,
            "rank": self._rank,
            "world_size": self._world_size,
            "feedback": self._feedback.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what :meth:`state_dict` of the same rank of an equally large job returned.

        Raises:
            ValueError: of another rank or world size, or not of this plan. Nothing has been changed.
        """
        if not isinstance(state, dict):
            raise ValueError(f"state: expected a dict, got {type(state).__name__}")
        missing = [key for key in ("step", "rank", "world_size", "feedback") if key not in state]
        if missing:
            raise ValueError(f"state: missing {', '.join(missing)}")
        if (state["rank"], state["world_size"]) != (self._rank, self._world_size):
            raise ValueError(
                f"state: of rank {state['rank']} of {state['world_size']}, "
                f"this is rank {self._rank} of {self._world_size}"
            )
        if type(state["step"]) is not int or state["step"] < 0:
            raise ValueError(f"state: step must be an int from 0 up, got {state['step']!r}")
        self._feedback.load_state_dict(state["feedback"], self._residual_sizes())
        self._step = state["step"]

    def _residual_sizes(self) -> dict[str, dict[str, int]]:
        """Elements of all that this rank can remember: of the whole unit, of the shard encoded again, of factors."""
        sizes: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
        for unit in self.plan.units:
            # the rounds of a low-rank method are of one encoding
            program = ENCODED_ALLREDUCE if unit.program == POWERSGD else unit.program
            each = encodings(program, unit.numel, self._topology, self._rank, unit.root)
            for kind, encoding in zip(ENCODINGS, each, strict=False):
                if unit.remembers(kind):
                    sizes[kind][unit.key] = unit.encoder(kind).states * (encoding.stop - encoding.start)
            for kind, numel in unit.compressor.factor_sizes(unit.numel).items():
                sizes[kind][unit.key] = numel
        return sizes

    def close(self) -> None:
        """End the lanes and the phases' process groups. The model cannot be trained further with this DDP wrapper."""
        self._closed = True
        if self._watch is not None:
            self._watch.remove()
        if self._engine is not None:
            self._engine.close()
        self._buckets.clear()


def _by_parameter(plan: Plan, ddp_model: DistributedDataParallel) -> list[tuple[UnitPlan, torch.nn.Parameter]]:
    parameters = _parameters(ddp_model)
    return [(unit, parameters[unit.parameter]) for unit in plan.units]


def _fail(future: torch.futures.Future[torch.Tensor], message: str) -> torch.futures.Future[torch.Tensor]:
    """Let backward raise at its end, with a text that holds ``message``; the type is DDP's choice.

    A hook that raises by itself leaves DDP in the middle of its buckets, and the next forward fails at an assertion.
    """
    future.set_exception(RuntimeError(f"gckernels: {message}"))  # type: ignore[arg-type]
    return future


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
