"""Synchronisation of a model without DistributedDataParallel."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.amp import GradScaler

from gckernels.compressor import Compressor
from gckernels.ops import Identity

from ..accuracy.accuracy import AccuracyLike
from ..communication.agreement import device_of
from ..frontends.checks.caller_modes import outside_inference_mode
from ..frontends.module.synchronizer import PlanSynchronizer
from ..plans.plan import Plan
from ..reporting.reported import Reported
from .tunable import Tunable, agreed_stages, warn_of_settings


class Synchronizer(Tunable, PlanSynchronizer, Reported):
    """Average the gradients of a model over the ranks, compressed as a plan says, from the next backward on.

    Without a plan one is found while the model is trained, as :func:`~gckernels.sync.attach` does.

    Every rank constructs it with the same arguments. Parameters and buffers then become those of rank 0. Nothing else
    changes in the training: when ``backward`` returns, ``.grad`` holds the mean on every rank, bit for bit the same,
    and clipping, gradient scalers and any number of optimizers work on it. ``.grad`` is a view of memory that the
    synchronizer keeps, so ``zero_grad`` is cheapest with ``set_to_none=False``.

    The model keeps its synchronizer, which ends when the model is gone; nobody else need keep it. A parameter that has
    a synchronizer cannot have another one, nor be averaged by a DistributedDataParallel model, until :meth:`close`, or
    ``destroy_process_group``.

    The first step is averaged without compression. :func:`~gckernels.sync.attach` gives the same gradients for the same
    plan, if the model is attached before its first step, and with ``start_step=1`` where parameters can be unused.
    Buffers such as those of batch norm are not synchronised after construction.

    Args:
        model: a module with parameters on one device, not wrapped in DistributedDataParallel. Parameters may be frozen
            and thawed between steps, the same ones on all ranks; frozen ones cost nothing. If parameters come into the
            model later, backward or the optimizer's step says so, and another synchronizer can be constructed.
        plan: a plan, which may merge parameters here, and may leave out frozen ones: if these are thawed, they are
            averaged exactly, and a warning names them. Or a compressor such as ``EFSignSGD()``, or its spec such as
            ``"BlockQuant(bits=4)"``, for the plan that :func:`gckernels.sync.uniform_plan` makes with it. ``None`` to
            find one.
        accuracy, steps, replan: as for :func:`~gckernels.sync.attach`, without a plan.
        strict: refuse a plan that does not name each parameter with its size. Otherwise parameters that are missing, or
            have another size, are averaged exactly, and a warning lists them.
        memory_budget_mb: MiB that residuals and buffers may take on a rank, beside the gradients. If the plan takes
            more, its most demanding units are averaged without compression, in place, and a warning names them.
        grad_scaler, can_discard: as for :func:`~gckernels.sync.attach`.
        process_group: the ranks that average their gradients; by default all ranks.
        bucket_cap_mb: MiB of gradients that are launched together, and that share their collectives if their programs
            are the same; by default 25. A plan that has launches says this itself.
        find_unused_parameters: gradients may be missing when backward ends. If no rank has a gradient, ``.grad`` is
            left as it is; else it becomes the mean, as if missing ones were zero. Costs a small collective per step.
            Without it a step in which a gradient is missing does not end, and the next one says so.
        seed: the seed of the stochastic compressors.
        start_step: the first step that is compressed, from 1 on.

    Raises:
        TypeError, ValueError, PlanError: an argument is not valid on this rank.
        RuntimeError: an argument is not valid on another rank, or not the same on all of them. Every rank raises.
    """

    @outside_inference_mode
    def __init__(
        self,
        model: torch.nn.Module,
        plan: Plan | Compressor | str | None = None,
        *,
        accuracy: AccuracyLike = "safe",
        steps: int | None = None,
        replan: bool = True,
        strict: bool = True,
        memory_budget_mb: float | None = None,
        grad_scaler: GradScaler | None = None,
        can_discard: bool = False,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        seed: int = 0,
        start_step: int = 0,
    ) -> None:
        stages = None
        if plan is not None:
            warn_of_settings("Synchronizer", accuracy, steps, replan)
        elif dist.is_initialized():
            group = process_group or dist.distributed_c10d._get_default_group()
            device = device_of(model)
            stages = agreed_stages("Synchronizer", group, device, accuracy, steps, replan, start_step, bucket_cap_mb)
        super().__init__(
            model,
            Identity() if plan is None else plan,
            strict=strict,
            memory_budget_mb=memory_budget_mb,
            grad_scaler=grad_scaler,
            can_discard=can_discard,
            process_group=process_group,
            bucket_cap_mb=bucket_cap_mb,
            find_unused_parameters=find_unused_parameters,
            seed=seed,
            start_step=0 if plan is None else start_step,
        )
        if stages is not None:
            self._tune(model, stages, replan)

    def _end(self) -> None:
        self._end_tuning()
        super()._end()
