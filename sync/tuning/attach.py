"""Compression of the gradients of a DistributedDataParallel model."""

from __future__ import annotations

from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from gckernels.method import Method

from ..attach.ddp import attach_plan
from ..plans.plan import Plan
from .attachment import Attachment


def attach(
    ddp_model: DistributedDataParallel,
    plan: Plan | Method | str,
    *,
    strict: bool = True,
    memory_budget_mb: float | None = None,
    grad_scaler: GradScaler | None = None,
    seed: int = 0,
    start_step: int = 0,
) -> Attachment:
    """Compress the gradients of a DDP model from the next backward on. Every rank calls it with the same arguments.

    Which parameters are compressed, and how they are sent, is the plan's choice: :func:`~gckernels.sync.plan` makes
    plans::

        attach(ddp_model, "EFSignSGD")
        attach(ddp_model, sync.plan(ddp_model, "EFSignSGD", program="allgather", exempt=["embedding.weight"]))

    The model keeps its attachment, which ends when the model is gone. No parameter may have another attachment, or a
    :class:`~gckernels.sync.Synchronizer`, at the same time.

    Gradients are averaged as DDP averages them, and are bitwise identical on all ranks. An iteration in which DDP still
    has all gradients in one bucket, as in the first of a training, is averaged without compression if it is the first
    one after ``attach``; so is everything with one rank. If the plan compresses nothing, DDP averages the gradients
    itself, without a hook.

    Args:
        ddp_model: the wrapped model, with no communication hook registered yet.
        plan: a plan that names all parameters; or a compressor such as ``EFSignSGD()``, or its spec such as
            ``"BlockQuant(bits=4)"``, for the plan that ``sync.plan(ddp_model, compressor)`` makes. If a compressor
            applies a momentum (``DGC``) and the optimizer does, too, the first step warns of it.
        strict: refuse a plan that does not name each parameter with its size. Otherwise parameters that are missing, or
            have another size, are averaged exactly, and a warning lists them.
        memory_budget_mb: MiB that residuals and buffers may take on a rank, beside the gradients. If the plan takes
            more, its most demanding units are averaged without compression, in place, and a warning names them.
        grad_scaler: the ``torch.amp.GradScaler`` that the loss is scaled with. Residuals then follow its scale, and
            become what they were when it skips a step. Takes a copy of the residuals, and goes over them twice more in
            each step. If there are residuals, and a scaler that is not given here, its first step warns of it.
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
    return attach_plan(
        ddp_model,
        plan,
        Attachment,
        strict=strict,
        memory_budget_mb=memory_budget_mb,
        grad_scaler=grad_scaler,
        seed=seed,
        start_step=start_step,
    )
