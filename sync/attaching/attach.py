"""The one way to attach compression to a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from gckernels.compressor import Compressor

from ..communication.agreement import agreed, device_of
from ..frontends.checks.caller_modes import outside_inference_mode
from ..frontends.frontend import ModelFrontend
from ..frontends.kinds import frontend_of, kind_of
from ..frontends.members import left_out
from ..frontends.ownership import end_spent
from ..frontends.request import UNCOMPRESSED, ModuleOptions, Request
from ..plans.plan import Plan
from ..tuning.auto import Auto
from .attachment import Attachment

_SAFE = Auto()


@outside_inference_mode
def attach(
    model: torch.nn.Module,
    plan: Plan | Compressor | str | Auto = _SAFE,
    *,
    strict: bool = True,
    memory_budget_mb: float | None = None,
    grad_scaler: GradScaler | None = None,
    can_discard: bool = False,
    residual_bits: int = 32,
    weights: Compressor | str | None = None,
    seed: int = 0,
    start_step: int = 0,
    process_group: dist.ProcessGroup | None = None,
    bucket_cap_mb: float | None = None,
    find_unused_parameters: bool = False,
    exclude: Sequence[str] = (),
) -> Attachment:
    """Average the gradients of a model over the ranks, compressed, from the next backward on. Every rank calls it with
    the same arguments.

    By default a plan is found while the model is trained, and compression stays only if it makes steps faster; see
    :class:`~gckernels.sync.Auto`. Or the second argument says how gradients are sent::

        attach(model)
        attach(model, sync.Auto(accuracy="aggressive", steps=10_000))
        attach(model, "EFSignSGD")
        attach(model, sync.uniform_plan(model, "EFSignSGD", program="allgather", exempt=["embedding.weight"]))

    The model keeps its attachment, which ends when the model is gone. No parameter may have another attachment at the
    same time. Gradients are bitwise identical on all ranks.

    **A DistributedDataParallel model** keeps its buckets. Gradients are averaged as DDP averages them. An iteration in
    which DDP still has all gradients in one bucket, as in the first of a training, is averaged without compression if
    it is the first one after ``attach``; so is everything with one rank. If the plan compresses nothing, DDP averages
    the gradients itself, without a hook.

    **A bare module** needs no wrapper. Its parameters and buffers become those of rank 0. Nothing else changes in the
    training: when ``backward`` returns, ``.grad`` holds the mean on every rank, and clipping, gradient scalers and any
    number of optimizers work on it. ``.grad`` is a view of memory that the attachment keeps: the next backward writes
    into it, also if ``.grad`` was set to ``None`` meanwhile, so clone gradients that are needed after that.
    ``zero_grad`` is cheapest with ``set_to_none=False``. Hooks of parameters change gradients before they are averaged,
    whenever the hooks were registered. Compiled autograd is refused. The first step is averaged without compression.
    The same plan gives the same gradients as with DDP, if the model is attached before its first step, and with
    ``start_step=1`` where parameters can be unused. Buffers such as those of batch norm are not synchronised later on.
    Parameters may be frozen and thawed between steps, the same ones on all ranks; frozen ones cost nothing. A backward
    that has failed after some gradients had come is an error in the next one, until the model is attached again. If
    parameters come into the model later, backward or the optimizer's step says so, and the model can be attached again.

    **A model of** ``fully_shard`` **or** ``replicate`` stays as FSDP2 has made it. With replicas, the average over
    these is compressed, and that of the shards is not; without replicas, the reduction to shards is. Its steps are
    counted, and its plans are changed, on all ranks of the mesh together. The first step is averaged without
    compression.

    Args:
        model: a DDP model with no communication hook registered yet, or a module with parameters on one device.
        plan: a plan that names all parameters; or a compressor such as ``EFSignSGD()``, or its spec such as
            ``"BlockQuant(bits=4)"``, for the plan that ``sync.uniform_plan(model, compressor)`` makes; or an
            :class:`~gckernels.sync.Auto` to find one. If a compressor applies a momentum (``DGC``) and the optimizer
            does, too, the first step warns of it. For a bare module a plan may merge parameters, and may leave out
            frozen ones: if these are thawed, they are averaged exactly, and a warning names them.
        strict: refuse a plan that does not name each parameter with its size. Otherwise parameters that are missing, or
            have another size, are averaged exactly, and a warning lists them.
        memory_budget_mb: MiB that residuals and buffers may take on a rank, beside the gradients. If the plan takes
            more, its most demanding units are averaged without compression, in place, and a warning names them.
        grad_scaler: the ``torch.amp.GradScaler`` that the loss is scaled with. Residuals then follow its scale, and
            become what they were when it skips a step. Takes a copy of the residuals, and goes over them twice more in
            each step. If there are residuals, and a scaler that is not given here, its first step warns of it.
        can_discard: keep a copy of the residuals from before each step, so that
            :meth:`~gckernels.sync.Attachment.discard_step` leaves nothing of a step. A gradient scaler needs this copy
            in any case.
        residual_bits: with 8, residuals of element-wise quantisers such as ``BlockQuant`` and ``EFSignSGD`` take a byte
            per element instead of four, and encoding is faster where memory is the limit. The training is another one,
            because each step loses up to a 127th of the largest of 256 neighbouring residuals, and reaches the same
            loss. Other compressors keep theirs in fp32.
        weights: for a model of ``fully_shard`` without replicas, encodes the parameters that FSDP gathers in forward
            and backward: ``"BlockQuant"`` in 8 bits, or ``"Cast16"``. All ranks compute with the same decoded
            parameters, and each optimizer goes on with its own exact shard. With fewer bits, as in
            ``"BlockQuant(bits=4)"``, each rank keeps a copy of all parameters (fp32), to which differences are sent in
            forward, and nothing in backward. Parameters with fewer than two dimensions are exact. With ``None`` all
            are. If a plan is found, it is tried as well, and stays only if that is faster than all plans with exact
            parameters; without this argument nothing encodes parameters. A plan with ``weights`` of its own keeps them.
        seed: the seed of the stochastic compressors.
        start_step: the first step that is compressed; those before it are averaged exactly. Gradients change fastest
            when a training begins, and an optimizer such as Adam then learns their magnitudes. Aggressive compressors
            with error feedback want a tenth of the steps, or less in a long training.
        process_group: for a bare module, the ranks that average their gradients; by default all ranks.
        bucket_cap_mb: for a bare module, MiB of gradients that are launched together, and that share their collectives
            if their programs are the same; by default 25. A plan that has launches says this itself, and so does one
            that is found.
        find_unused_parameters: for a bare module, gradients may be missing when backward ends. If no rank has used a
            parameter, its ``.grad`` is left as it is; else that becomes the mean of what ranks have in ``.grad``, as if
            missing ones were zero. Costs a small collective per step. Without it a step in which a gradient is missing
            does not end, and the optimizer or the next backward says so.

        exclude: for a bare module, the names of parameters and buffers that each rank has alone, such as its experts.
            They are left as they are, and so is what DDP would ignore in the module
            (``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model``). A plan may have them.

    Returns:
        The attachment. It has the residuals for checkpoints and the bytes that were sent; ``close`` ends it.

    Raises:
        TypeError, ValueError, PlanError: an argument is not valid on this rank.
        RuntimeError: an argument is not valid on another rank, or not the same on all of them. Every rank raises.
    """
    if not dist.is_initialized():
        raise RuntimeError("attach: torch.distributed is not initialised; call init_process_group first")
    frontend: type[ModelFrontend] = frontend_of(kind_of(model))
    averaging, everyone = frontend.groups(model, process_group)
    request = Request(
        frontend=frontend.kind,
        group=averaging,
        everyone=everyone,
        device=device_of(model),
        plan=UNCOMPRESSED if isinstance(plan, Auto) else plan,
        strict=strict,
        memory_budget_mb=memory_budget_mb,
        grad_scaler=grad_scaler,
        can_discard=can_discard,
        residual_bits=residual_bits,
        weights=weights,
        seed=seed,
        start_step=0 if isinstance(plan, Auto) else start_step,
        options=ModuleOptions(process_group, bucket_cap_mb, find_unused_parameters, exclude or ()),
        is_tuned=isinstance(plan, Auto),
        left_out=frozenset() if frontend.kind.traits.is_wrapped else ranks_own(model, exclude),
    )

    def check() -> tuple[Plan, list[str]]:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"attach: model must be a torch.nn.Module, got {type(model).__name__}")
        lines = _checked_auto(plan, start_step, request.options) if isinstance(plan, Auto) else []
        if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
            raise TypeError("attach: model is compiled; attach to the DistributedDataParallel model, then compile that")
        checked, more = frontend.checked_plan(model, request)
        is_useless = checked.compresses and not any(unit.encodes_residuals for unit in checked.units)
        if residual_bits == 8 and is_useless and not isinstance(plan, Auto):
            raise ValueError(
                "attach: residual_bits must be 32 for a plan without residuals of element-wise quantisers such as "
                "BlockQuant, got 8"
            )
        return checked, [*more, *lines]

    agreed_plan = agreed("attach", everyone, request.device, check)
    end_spent(model)
    attachment = Attachment(frontend(model, agreed_plan, request), request)
    if isinstance(plan, Auto):
        attachment._tune(model, plan, start_step)
    return attachment


def ranks_own(model: object, exclude: Any) -> frozenset[str]:
    """The plain names of the parameters and buffers of a model that each rank has alone. Arguments that are not valid
    are refused later, on all ranks together."""
    is_list = isinstance(exclude, list | tuple | set | frozenset) and all(isinstance(each, str) for each in exclude)
    return left_out(model, exclude if is_list else ()) if isinstance(model, torch.nn.Module) else frozenset()


def _checked_auto(auto: Auto, start_step: int, options: ModuleOptions) -> list[str]:
    """Texts of the settings of a tuning, which must be the same on all ranks."""
    if type(start_step) is not int or start_step < 0:
        raise ValueError(f"attach: start_step must be an int from 0 up, got {start_step!r}")
    if options.bucket_cap_mb is not None:
        raise ValueError(
            "attach: bucket_cap_mb must be None without a plan, because the plan that is found says what is launched "
            f"together, got {options.bucket_cap_mb!r}"
        )
    return auto.lines(start_step)
