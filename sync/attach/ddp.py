"""Attach compression to a DistributedDataParallel model.

:func:`attach` registers a communication hook. DDP calls it with each bucket of gradients as soon as backward has
filled it; the hook queues the bucket's messages on the engine's lanes and returns a future, so encoding, both phases
of communication and decoding overlap with the rest of backward and with each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

import gckernels
from gckernels.method import Method

from ..engine.runtime import Runtime, failure
from ..messages.message import Message, Unit
from ..plans.arguments import Exempt, as_scaler
from ..plans.builders import exempt_vectors
from ..plans.parameters import of_ddp, refuse_sharded, refuse_without_dense_gradients, watch_for_sparse_gradients
from ..plans.plan import Plan, PlanError, UnitPlan
from ..plans.strides import in_reals
from ..programs.steps import Program
from ..programs.topology import Topology
from .agreement import agreed, device_of
from .claims import Claim, attached, keep_alive, refuse_claimed
from .executed import Executed
from .optimizers import refuse_steps_in_backward, watch_optimizers
from .request import Choice


def attach(
    ddp_model: DistributedDataParallel,
    compressor_or_plan: Method | Plan | str | None = None,
    *,
    program: Program | str | None = None,
    exempt: Exempt | Iterable[str] | None = exempt_vectors,
    topology: Topology | tuple[int, int] | None = None,
    strict: bool = True,
    memory_budget_mb: float | None = None,
    grad_scaler: GradScaler | None = None,
    seed: int = 0,
    start_step: int = 0,
) -> Attachment:
    """Compress the gradients of a DDP model from the next backward on. Every rank calls it, with the same arguments.

    The model keeps its attachment, which ends when the model is gone. No parameter may have another attachment, or a
    :class:`~gckernels.sync.Synchronizer`, at the same time.

    Gradients are averaged as DDP does it and are bitwise identical on all ranks. The first iteration, in which DDP
    still has all gradients in one bucket, is averaged without compression; so is everything with one rank.

    Args:
        ddp_model: the wrapped model, with no communication hook registered yet.
        compressor_or_plan: one compressor for every parameter that is not exempt, such as ``EFSignSGD()`` or, as a
            spec, ``"BlockQuant(bits=4)"``; or a plan that names all of them. It must be given. If it applies a momentum
            (``DGC``) and the optimizer does, too, the first step warns of it.
        program: how units are sent, or the name of that in ``gckernels.sync.PROGRAMS``; by default
            :func:`~gckernels.sync.default_program`. Not with a plan.
        exempt: the parameters that are sent exactly: a rule, ``(name, parameter) -> bool``, a list of names, or
            ``None`` for none; by default those with fewer than two dimensions. Not with a plan.
        topology: which ranks are on one machine, for programs that say so, or ``(machines, devices)``. Not with a
            plan.
        strict: refuse a plan that does not name each parameter with its size. Otherwise parameters that are missing, or
            have another size, are averaged exactly, and a warning lists them.
        memory_budget_mb: MiB that residuals and buffers may take on a rank, beside the gradients. Where the plan takes
            more, its most demanding units are averaged without compression, in place, and a warning names them.
        grad_scaler: the ``torch.amp.GradScaler`` that the loss is scaled with. Residuals then follow its scale, and
            become what they were when it skips a step. Takes a copy of the residuals, and goes over them twice more in
            each step. A scaler that is not given here is warned of in its first step, if there are residuals.
        seed: of the stochastic compressors.
        start_step: the first step that is compressed; those before it are averaged exactly. Gradients change fastest
            when a training begins, and an optimizer such as Adam then learns their magnitudes: a tenth of the steps, or
            less in a long training, is what aggressive compressors with error feedback want.

    Returns:
        The attachment. It has the residuals for checkpoints and the bytes that were sent; ``close`` ends it.

    Raises:
        TypeError, ValueError, PlanError: an argument is not valid on this rank.
        RuntimeError: not valid on another rank, or not the same on all of them. Every rank raises.
    """
    if not dist.is_initialized():
        raise RuntimeError("attach: torch.distributed is not initialised; call init_process_group first")

    def check() -> tuple[Plan, list[str]]:
        choice = Choice(compressor_or_plan, program, exempt, topology, strict, memory_budget_mb, grad_scaler)
        plan, summary = _checked_plan(ddp_model, choice)
        if type(seed) is not int:
            raise TypeError(f"attach: seed must be an int, got {type(seed).__name__}")
        if type(start_step) is not int or start_step < 0:
            raise ValueError(f"attach: start_step must be an int from 0 up, got {start_step!r}")
        settings = f"{summary}, seed {seed}, start_step {start_step}, gckernels {gckernels.__version__}"
        return plan, [settings, *plan.lines()]

    is_ddp = isinstance(ddp_model, DistributedDataParallel)
    group = ddp_model.process_group if is_ddp else dist.distributed_c10d._get_default_group()
    device = device_of(ddp_model)
    plan = agreed("attach", group, device, check)
    attachment = Attachment(ddp_model, plan, group, device, seed, start_step, as_scaler("attach", grad_scaler))
    try:
        ddp_model.register_comm_hook(None, attachment._hook)
    except BaseException:  # a reason of DDP's own, that the checks above do not know
        attachment.close()
        raise
    attached.add(ddp_model)
    keep_alive([ddp_model], attachment.close)
    return attachment


def _checked_plan(ddp_model: Any, choice: Choice) -> tuple[Plan, str]:
    """The plan, and what to call it in a message to other ranks."""
    if isinstance(getattr(ddp_model, "_orig_mod", None), DistributedDataParallel):
        raise TypeError("attach: ddp_model is compiled; attach to the DistributedDataParallel model, then compile that")
    if not isinstance(ddp_model, DistributedDataParallel):
        if isinstance(ddp_model, torch.nn.Module):
            refuse_sharded("attach", ddp_model)
        raise TypeError(f"attach: ddp_model must be a DistributedDataParallel model, got {type(ddp_model).__name__}")
    if ddp_model in attached:
        raise ValueError("attach: ddp_model has a gckernels attachment already; a model can have one")
    # not from its list of hooks, which lacks the built-in ones
    known = ddp_model._get_ddp_logging_data()  # type: ignore[no-untyped-call]
    if known.get("comm_hook"):
        raise ValueError("attach: ddp_model has a communication hook already; DDP can have one")
    parameters = of_ddp(ddp_model)
    if (averaged := known.get("num_parameter_tensors", len(parameters))) != len(parameters):
        raise ValueError(
            f"attach: ddp_model averages {averaged} parameters since it was made, and {len(parameters)} need gradients "
            "now; freeze and thaw before wrapping, and attach before the first forward of a model of DTensors"
        )
    refuse_claimed("attach", parameters)
    refuse_without_dense_gradients("attach", ddp_model.module, parameters)
    refuse_steps_in_backward("attach", parameters)
    world_size = dist.get_world_size(ddp_model.process_group)
    plan, summary = choice.plan("attach", parameters, world_size)
    if merged := [unit.key for unit in plan.units if unit.also]:
        raise PlanError(f"plan merges parameters, which DDP's buckets may part; Synchronizer can: {', '.join(merged)}")
    return plan, summary


class Attachment(Executed):
    """What :func:`attach` has attached: the hook, the engine behind it, the residuals."""

    def __init__(
        self,
        ddp_model: DistributedDataParallel,
        plan: Plan,
        group: dist.ProcessGroup,
        device: torch.device,
        seed: int,
        start_step: int,
        grad_scaler: GradScaler | None,
    ) -> None:
        self.plan = plan
        parameters = of_ddp(ddp_model)
        self._units: dict[int, list[UnitPlan]] = {}
        for unit in plan.units:
            self._units.setdefault(id(parameters[unit.parameter]), []).append(unit)
        # in the very first step one bucket has all gradients, and DDP will rebuild it: there is nothing to overlap with
        first = max(start_step, 1)
        keep_unused = ddp_model.find_unused_parameters or ddp_model.static_graph
        self._runtime = Runtime(plan, group, device, seed, first, keep_unused, grad_scaler, parameters)
        self._buckets: dict[int, tuple[Any, list[Message]]] = {}
        self._watches = [*watch_optimizers(plan, parameters, grad_scaler), *watch_for_sparse_gradients(parameters)]
        self._claim = Claim(parameters.values())

    # ---------------------------------------------------------------- the hook

    # DDP compares a hook's annotations with its types and refuses postponed ones, which are text: so none here
    def _hook(self, _, bucket):  # type: ignore[no-untyped-def]
        return self._synchronise(bucket)

    def _synchronise(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer, runtime = bucket.buffer(), self._runtime
        on_cuda = runtime.device.type == "cuda"
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[runtime.device] if on_cuda else None)
        if (problem := runtime.problem) is not None:
            return _fail(future, problem)
        runtime.submit(
            self._messages(bucket),
            lambda: future.set_result(buffer),
            lambda error: _fail(future, failure(error)),
            first=bucket.index() == 0,
            last=bucket.is_last(),
        )
        return future

    def _messages(self, bucket: GradBucket) -> list[Message]:
        """The bucket's messages; built when DDP shows a bucket for the first time or has rebuilt it, and when
        compression begins or comes to another stage."""
        buffer, parameters = bucket.buffer(), bucket.parameters()
        key = (buffer.data_ptr(), self._runtime.stage, tuple(id(parameter) for parameter in parameters))
        known = self._buckets.get(bucket.index())
        if known is None or known[0] != key:
            units, first = [], 0
            # one after the other; bucket.gradients() would be wrong for complex ones, of which it counts no reals
            for parameter in parameters:
                for unit in self._units[id(parameter)]:
                    start = first + (unit.start or 0)
                    units.append(Unit(unit, buffer[start : start + unit.numel]))
                first += in_reals(parameter).numel()
            assert first == buffer.numel()
            known = self._buckets[bucket.index()] = (key, self._runtime.messages(buffer, units))
        return known[1]

    # ---------------------------------------------------------------- for the user

    def close(self) -> None:
        """End the lanes and the phases' process groups. The model cannot be trained further with this DDP wrapper."""
        self._claim.release()
        for watch in self._watches:
            watch.remove()
        self._runtime.close()
        self._buckets.clear()


class _Failed:
    """The value of a future that has failed. DDP takes no exception from a hook's future: it wants a tensor, and puts
    the text of anything else into an error of its own, "Unable to cast ... to Tensor". To ask for the text raises the
    error itself here, and backward raises that, with its cause."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __str__(self) -> str:
        raise self._error

    def __repr__(self) -> str:
        return repr(self._error)


def _fail(future: torch.futures.Future[torch.Tensor], error: Exception) -> torch.futures.Future[torch.Tensor]:
    """Let backward raise ``error`` at its end.

    A hook that raises by itself leaves DDP in the middle of its buckets, and the next forward fails at an assertion.
    """
    future.set_result(_Failed(error))  # type: ignore[arg-type]
    return future
