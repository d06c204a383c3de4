"""The way to average what optimizers make of the gradients of each rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.amp import GradScaler

from gckernels.compressor import Compressor

from ..communication.agreement import agreed, device_of
from ..frontends.checks.caller_modes import outside_inference_mode
from ..frontends.ownership import end_spent
from ..frontends.request import ModuleOptions
from ..frontends.updates.anchors import PLAIN_MEAN
from ..frontends.updates.updates_frontend import UpdatesFrontend
from ..frontends.updates.updates_request import Outer, UpdatesRequest
from ..plans.plan import Frontend, Plan
from .attachment import Attachment


@outside_inference_mode
def average_updates(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    plan: Plan | Compressor | str,
    *,
    every: int = 1,
    outer: Outer | None = None,
    decay: float | None = None,
    grad_scaler: GradScaler | None = None,
    residual_bits: int = 32,
    seed: int = 0,
    start_step: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> Attachment:
    """Average the updates of a model over the ranks, compressed, in place of its gradients. Every rank calls it with
    the same arguments.

    Each rank steps its own optimizer on its own gradients, with its own moments. An update is the change of the
    parameters in a round, which has a number of steps. After each round the mean of the updates is added to the
    parameters with which it began, and the parameters are bitwise identical on all ranks. The loop stays as it is on
    one device, and nothing is wrapped::

        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        attachment = sync.average_updates(model, optimizer, "EFSignSGD", every=2)

    This is local SGD, with compression; with an outer optimizer it is DiLoCo (Douillard et al., arXiv:2311.08105)::

        outer = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
        attachment = sync.average_updates(model, optimizer, "BlockQuant(bits=4)", every=100, outer=outer)

    Parameters and buffers become those of rank 0. From then on buffers, such as those of batch norm, are each rank's
    own. Clipping sees the gradient of one rank. All ranks make the same number of steps. Inside a round the parameters
    differ between ranks, so evaluate and save models between rounds. A model that loads a ``state_dict`` later on makes
    the next step raise an error, because the next mean would undo it.

    The attachment counts rounds as steps. Its ``no_sync`` changes nothing, ``exact`` is for rounds that end in it, and
    updates cannot be discarded. Its state resumes a training bit for bit, also inside a round: it has the parameters of
    this rank, those with which the round began, the state of ``outer``, and residuals. The training saves the state of
    ``optimizer``, for each rank. In a job of another size, each rank goes on with the mean of the parameters.

    Args:
        model: a module with parameters on one device, neither in DistributedDataParallel nor of ``fully_shard``. Frozen
            parameters are not sent.
        optimizer: the optimizer whose steps count. Changes of the model by others in a round are averaged, too.
        plan: a compressor such as ``EFSignSGD()`` or its spec, or a plan for a bare module, whose steps are rounds.
            Results of compressors must be means.
        every: the number of steps of a round.
        outer: a function that makes an optimizer of a list of parameters, for which the mean update, from the end of
            the round to its begin, is a gradient. Its parameters have 32 bits or more. By default the mean is added.
        decay: from 0 to 1, by which residuals are multiplied before they are added to the next update. With 1 nothing
            is lost. The default is what has been best for signs: 0.5 for rounds of one or two steps, and 1 for longer
            ones.
        grad_scaler: the gradient scaler that calls the steps of ``optimizer``. A step that it skips on one rank counts
            there, as an update of zero; its method ``step`` is wrapped for that.
        residual_bits: with 8, residuals of element-wise quantisers take a byte per element instead of four.
        seed: the seed of the stochastic compressors.
        start_step: the number of rounds of one step each that come first, and are averaged exactly.
        process_group: the ranks that average their updates; by default all ranks.

    Returns:
        The attachment. It has the figures and the state for checkpoints; ``close`` ends it.

    Raises:
        TypeError, ValueError, PlanError: an argument is not valid on this rank.
        RuntimeError: an argument is not valid on another rank, or not the same on all of them. Every rank raises.
    """
    if not dist.is_initialized():
        raise RuntimeError("average_updates: torch.distributed is not initialised; call init_process_group first")
    averaging, everyone = UpdatesFrontend.groups(model, process_group)
    request = UpdatesRequest(
        Frontend.MODULE,
        averaging,
        everyone,
        device_of(model),
        plan,
        True,
        None,
        None,
        False,
        residual_bits,
        None,
        seed,
        start_step,
        ModuleOptions(process_group),
        decay=_default_decay(every) if decay is None else decay,
        optimizer=optimizer,
        every=every,
        outer=PLAIN_MEAN if outer is None else outer,
        scaler=grad_scaler,
    )

    def check() -> tuple[Plan, list[str]]:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"average_updates: model must be a torch.nn.Module, got {type(model).__name__}")
        return UpdatesFrontend.checked_plan(model, request)

    agreed_plan = agreed("average_updates", everyone, request.device, check)
    end_spent(model)
    return Attachment(UpdatesFrontend(model, agreed_plan, request), request)


def _default_decay(every: int) -> float:
    """The decay that has been best for signs (``bench/training/updates.py``)."""
    return 0.5 if every in (1, 2) else 1.0
