"""Compression of the gradients of a DistributedDataParallel model."""

from __future__ import annotations

import torch.distributed as dist
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from gckernels.compressor import Compressor
from gckernels.ops import Identity

from ..accuracy.accuracy import AccuracyLike
from ..communication.agreement import device_of
from ..frontends.checks.caller_modes import outside_inference_mode
from ..frontends.ddp.ddp import attach_plan
from ..plans.plan import Plan
from .attachment import Attachment
from .tunable import agreed_stages, warn_of_settings


@outside_inference_mode
def attach(
    ddp_model: DistributedDataParallel,
    plan: Plan | Compressor | str | None = None,
    *,
    accuracy: AccuracyLike = "safe",
    steps: int | None = None,
    replan: bool = True,
    strict: bool = True,
    memory_budget_mb: float | None = None,
    grad_scaler: GradScaler | None = None,
    can_discard: bool = False,
    seed: int = 0,
    start_step: int = 0,
) -> Attachment:
    """Compress the gradients of a DDP model from the next backward on, if that makes its steps faster. Every rank calls
    it with the same arguments.

    Without a plan one is found while the model is trained::

        attach(ddp_model)
        attach(ddp_model, accuracy="aggressive", steps=10_000)

    The links and compressors of the machine are measured in this call, which takes 10 seconds, unless they are known.
    The first steps are plain ones. Some are recorded; then plans are made, and the best ones run in turns of ten real
    steps beside plain ones. After 60 steps the fastest stays, often plain DDP. Turns go on
    if several plans are close, and for up to 400 steps if noise hides whether one is faster. Whatever fails ends this
    with a warning, and plain DDP goes on.

    With a plan, that says which parameters are compressed, and how they are sent;
    :func:`~gckernels.sync.uniform_plan` makes plans::

        attach(ddp_model, "EFSignSGD")
        attach(ddp_model, sync.uniform_plan(ddp_model, "EFSignSGD", program="allgather", exempt=["embedding.weight"]))

    The model keeps its attachment, which ends when the model is gone. No parameter may have another attachment, or a
    :class:`~gckernels.sync.Synchronizer`, at the same time.

    Gradients are averaged as DDP averages them, and are bitwise identical on all ranks. An iteration in which DDP still
    has all gradients in one bucket, as in the first of a training, is averaged without compression if it is the first
    one after ``attach``; so is everything with one rank. If the plan compresses nothing, DDP averages the gradients
    itself, without a hook.

    Args:
        ddp_model: the wrapped model, with no communication hook registered yet.
        plan: a plan that names all parameters; or a compressor such as ``EFSignSGD()``, or its spec such as
            ``"BlockQuant(bits=4)"``, for the plan that ``sync.uniform_plan(ddp_model, compressor)`` makes. If a
            compressor applies a momentum (``DGC``) and the optimizer does, too, the first step warns of it. ``None`` to
            find one.
        accuracy: without a plan, the compressors that may be used. ``"exact"`` is none; ``"safe"`` those that lose
            nothing; ``"aggressive"`` also those that may lose a little, after a tenth of the training; a number from 0
            to 1 the largest relative error of a gradient, which is aggressive above 0.2; or a list of compressors. A
            plan of a loaded state that it does not allow is left by an exact step.
        steps: the number of steps of the whole training; needed for aggressive accuracy.
        replan: without a plan, whether a new one is found when the machine or its links have changed.
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
        seed: the seed of the stochastic compressors.
        start_step: the first step that is compressed; those before it are averaged exactly. Gradients change fastest
            when a training begins, and an optimizer such as Adam then learns their magnitudes. Aggressive compressors
            with error feedback want a tenth of the steps, or less in a long training.

    Returns:
        The attachment. It has the residuals for checkpoints and the bytes that were sent; ``close`` ends it.

    Raises:
        TypeError, ValueError, PlanError: an argument is not valid on this rank.
        RuntimeError: an argument is not valid on another rank, or not the same on all of them. Every rank raises.
    """
    stages = None
    if plan is not None:
        warn_of_settings("attach", accuracy, steps, replan)
    elif dist.is_initialized():
        is_ddp = isinstance(ddp_model, DistributedDataParallel)
        group = ddp_model.process_group if is_ddp else dist.distributed_c10d._get_default_group()
        stages = agreed_stages("attach", group, device_of(ddp_model), accuracy, steps, replan, start_step)
    attachment = attach_plan(
        ddp_model,
        Identity() if plan is None else plan,
        Attachment,
        strict=strict,
        memory_budget_mb=memory_budget_mb,
        grad_scaler=grad_scaler,
        can_discard=can_discard,
        seed=seed,
        start_step=0 if plan is None else start_step,
    )
    if stages is not None:
        attachment._tune(ddp_model, stages, replan)
    return attachment
