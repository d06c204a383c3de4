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
from ..frontends.checks.models import inside_fabric
from ..frontends.frontend import ModelFrontend
from ..frontends.kinds import frontend_of
from ..frontends.members import left_out
from ..frontends.ownership import end_spent
from ..frontends.request import UNCOMPRESSED, ModuleOptions, Request
from ..plans.plan import Plan
from ..tuning.auto import Auto
from .attachment import Attachment
from .updates import Updates

_SAFE = Auto()


@outside_inference_mode
def attach(
    model: torch.nn.Module,
    how: Plan | Compressor | str | Auto | Updates = _SAFE,
    *,
    strict: bool = True,
    memory_budget_mb: float | None = None,
    grad_scaler: GradScaler | Sequence[GradScaler] | None = None,
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
    :class:`~gckernels.sync.Auto`. Or the second argument says how the ranks are averaged::

        attach(model)
        attach(model, sync.Auto(accuracy="aggressive", steps=10_000))
        attach(model, "EFSignSGD")
        attach(model, sync.uniform_plan(model, "EFSignSGD", program="allgather", exempt=["embedding.weight"]))
        attach(model, sync.Updates(optimizer, "EFSignSGD", every=2))

    The model keeps its attachment, which ends when the model is gone. No parameter may have another attachment at the
    same time. Gradients are bitwise identical on all ranks.

    DDP keeps its buckets. For a bare module parameters and buffers become those of rank 0, ``backward`` returns with
    the mean in ``.grad``, and the next backward writes into the same memory. FSDP2 keeps its shards; with replicas the
    average over these is compressed, otherwise the reduction to shards. The first step of a training is averaged
    without compression. The page about :doc:`attaching </howto/attach>` has the rest about each kind of model.

    Args:
        model: a DDP model with no communication hook registered yet, or a module with parameters on one device; or
            either of them as Lightning Fabric has set it up.
        how: a compressor such as ``EFSignSGD()``, or its spec such as ``"BlockQuant(bits=4)"``, for the plan that
            ``sync.uniform_plan(model, compressor)`` makes; or a plan that names all parameters; or an
            :class:`~gckernels.sync.Auto` to find one; or :class:`~gckernels.sync.Updates` to average updates in place
            of gradients. If a compressor applies a momentum (``DGC``) and the optimizer does, too, the first step warns
            of it. For a bare module a plan may merge parameters, and may leave out frozen ones: if these are thawed,
            they are averaged exactly, and a warning names them.
        strict: refuse a plan that does not name each parameter with its size. Otherwise parameters that are missing, or
            have another size, are averaged exactly, and a warning lists them.
        memory_budget_mb: for gradients, MiB that residuals and buffers may take on a rank, beside the gradients. If the
            plan takes more, its most demanding units are averaged without compression, in place, and a warning names
            them.
        grad_scaler: the ``torch.amp.GradScaler`` that the loss is scaled with. Residuals of gradients then follow its
            scale, and become what they were when it skips a step. Takes a copy of the residuals, and goes over them
            twice more in each step. If there are residuals, and a scaler that is not given here, its first step warns
            of it. For updates also a list, of all that call the steps of the optimizers: a step that a scaler skips on
            one rank counts there, as an update of zero, and its method ``step`` is wrapped for that.
        can_discard: for gradients, keep a copy of the residuals from before each step, so that
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
            with error feedback want a tenth of the steps, or less in a long training. For updates it is the number of
            rounds of one step each that come first.
        process_group: for a bare module and for updates, the ranks that average; by default all ranks.
        bucket_cap_mb: for gradients of a bare module, MiB that are launched together, and that share their collectives
            if their programs are the same; by default 25. A plan that has launches says this itself, and so does one
            that is found.
        find_unused_parameters: for a bare module, gradients may be missing when backward ends. If no rank has used a
            parameter, its ``.grad`` is left as it is; else that becomes the mean of what ranks have in ``.grad``, as if
            missing ones were zero. Costs a small collective per step. Without it a step in which a gradient is missing
            does not end, and the optimizer or the next backward says so.
        exclude: for a bare module and for updates, the names of parameters and buffers that each rank has alone, such
            as its experts. They are left as they are, and so is what DDP would ignore in the module
            (``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model``). A plan may have them.

    Returns:
        The attachment. It has the residuals for checkpoints and the bytes that were sent; ``close`` ends it.

    Raises:
        TypeError, ValueError, PlanError: an argument is not valid on this rank.
        RuntimeError: an argument is not valid on another rank, or not the same on all of them. Every rank raises.
    """
    if not dist.is_initialized():
        raise RuntimeError("attach: torch.distributed is not initialised; call init_process_group first")
    model = inside_fabric(model)
    updates, wrapped = how if isinstance(how, Updates) else None, model
    if updates is not None and isinstance(model, DistributedDataParallel):
        model = model.module  # names are those of the module, as elsewhere
    frontend: type[ModelFrontend] = frontend_of(model) if updates is None else updates.frontend
    auto = (how if isinstance(how, Auto) else None) if updates is None else updates.auto
    averaging, everyone = frontend.groups(model, process_group)
    request = Request(
        frontend=frontend.kind,
        group=averaging,
        everyone=everyone,
        device=device_of(model),
        plan=UNCOMPRESSED if isinstance(how, Auto | Updates) else how,
        strict=strict,
        memory_budget_mb=memory_budget_mb,
        grad_scaler=grad_scaler,
        can_discard=can_discard,
        residual_bits=residual_bits,
        weights=weights,
        seed=seed,
        start_step=start_step,
        options=ModuleOptions(process_group, bucket_cap_mb, find_unused_parameters, exclude or ()),
        is_tuned=auto is not None,
        left_out=ranks_own(model, exclude) if updates or not frontend.kind.traits.is_wrapped else frozenset(),
    )
    if updates is not None:
        request = updates.request(model, wrapped, request)

    def check() -> tuple[Plan, list[str]]:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"attach: model must be a torch.nn.Module, got {type(model).__name__}")
        request.check_settings()
        settings = [] if auto is None else auto.lines(start_step)
        if auto is not None and bucket_cap_mb is not None:
            raise ValueError(
                "attach: bucket_cap_mb must be None without a plan, because the plan that is found says what is "
                f"launched together, got {bucket_cap_mb!r}"
            )
        if isinstance(getattr(model, "_orig_mod", None), DistributedDataParallel):
            raise TypeError("attach: model is compiled; attach to the DistributedDataParallel model, then compile that")
        checked, lines = frontend.checked_plan(model, request)
        is_useless = checked.compresses and not any(unit.encodes_residuals for unit in checked.units)
        if residual_bits == 8 and is_useless and auto is None:
            raise ValueError(
                "attach: residual_bits must be 32 for a plan without residuals of element-wise quantisers such as "
                "BlockQuant, got 8"
            )
        return checked, [*lines, *settings]

    agreed_plan = agreed("attach", everyone, request.device, check)
    end_spent(model)
    attachment = Attachment(frontend(model, agreed_plan, request), request)
    if auto is not None:
        attachment._tune(model, auto, start_step)
    return attachment


def ranks_own(model: object, exclude: Any) -> frozenset[str]:
    """The plain names of the parameters and buffers of a model that each rank has alone. Arguments that are not valid
    are refused later, on all ranks together."""
    is_list = isinstance(exclude, list | tuple | set | frozenset) and all(isinstance(each, str) for each in exclude)
    return left_out(model, exclude if is_list else ()) if isinstance(model, torch.nn.Module) else frozenset()
