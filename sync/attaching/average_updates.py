"""The way to average what optimizers make of the gradients of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

from gckernels.compressor import Compressor

from ..communication.agreement import agreed, device_of
from ..frontends.checks.caller_modes import outside_inference_mode
from ..frontends.ownership import end_spent
from ..frontends.request import UNCOMPRESSED, ModuleOptions
from ..frontends.updates.schedule import Every, Schedule
from ..frontends.updates.site_parameters import without_elements
from ..frontends.updates.updates_frontend import UpdatesFrontend
from ..frontends.updates.updates_request import PLAIN_MEAN, Outer, UpdatesRequest
from ..plans.plan import Frontend, Plan
from ..tuning.auto import Auto
from .attach import ranks_own
from .attachment import Attachment

AGGRESSIVE = ("EFSignSGD(block=1024, magnitude='projection')", "BlockQuant(bits=4)", "BlockQuant")
"""The compressors of updates that the rule ``"aggressive"`` stands for."""
_DECAYING = 2
"""The number of steps of the longest rounds whose residuals decay by default."""
_SAFE = Auto()


@outside_inference_mode
def average_updates(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    plan: Plan | Compressor | str | Auto = _SAFE,
    *,
    every: Every = 1,
    fragments: int = 1,
    delay: int = 0,
    mixing: float | None = None,
    outer: Outer | None = None,
    anchor_device: torch.device | str | None = None,
    decay: float | None = None,
    scale_steps: bool | None = None,
    grad_scaler: GradScaler | Sequence[GradScaler] | None = None,
    residual_bits: int = 32,
    seed: int = 0,
    start_step: int = 0,
    process_group: dist.ProcessGroup | None = None,
    exclude: Sequence[str] = (),
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

    Parameters and buffers become those of rank 0. Floating-point buffers that are saved with the model, such as the
    statistics of batch norm, become their mean after each round; all other buffers are each rank's own. Clipping sees
    the gradient of one rank. All ranks make the same number of steps. Inside a round the parameters differ between
    ranks, so evaluate and save models between rounds. A model that loads a ``state_dict`` later on makes the next step
    raise an error, because the next mean would undo it.

    With ``fragments`` a round sends the model in parts, one after the other, and with ``delay`` the training goes on
    until the mean of a part arrives, beside the communication (Streaming DiLoCo, Douillard et al., arXiv:2501.18512)::

        attachment = sync.average_updates(model, optimizer, "BlockQuant(bits=4)", every=100, fragments=4, delay=5)

    The attachment counts synchronisations as steps, of which a round has one for each fragment. Its ``no_sync`` changes
    nothing, ``exact`` is for synchronisations that begin in it, and updates cannot be discarded. Its state resumes a
    training bit for bit, also inside a round: it has the parameters and the state of ``optimizer`` of this rank, the
    parameters with which the round began, the state of ``outer``, and residuals. In a job of another size, each rank
    goes on with the means of the parameters and of the states of ``optimizer``.

    Args:
        model: a module with parameters on one device. Frozen parameters are not sent. Ranks of a site may share it, in
            DistributedDataParallel or by ``fully_shard``, with process groups that are less than all ranks.
        optimizer: the optimizer that steps the model; or a list of all optimizers that do, such as Muon and AdamW. A
            step ends when each of them has made one, in any order, and a second one before that raises an error, as
            does a step of one that was not given. Anything else that changes the model in a round is averaged, too.
        plan: a compressor such as ``EFSignSGD()`` or its spec, or a plan for a bare module, whose steps are rounds.
            Results of compressors must be means. Beside a codec of fewer bits, vectors are sent in 8 bits. By default,
            and with an :class:`~gckernels.sync.Auto`, one compressor is found while the model is trained: rounds with
            each of those that ``accuracy`` allows are timed. ``"aggressive"`` allows signs, from the first round on,
            and needs no ``steps``. Times alone decide; ``every`` is always yours.
        every: the number of steps of a round. Rounds may grow: ``{0: 2, 1000: 8, 2000: 8}`` has rounds of two steps, of
            eight from 1000 steps on, and one that ends with step 2000.
        fragments: the number of parts of the model, with about the same number of bytes, which are sent one after the
            other in a round. With more than one, the parameters never are the same on all ranks together; those of a
            fragment are when it arrives.
        delay: the number of steps between the sending of a fragment and the arrival of its mean, at most
            ``every // fragments``. Updates of these steps are kept: they are added to the new parameters, and are sent
            with the next round.
        mixing: the weight of this rank's own parameters when a mean arrives after a delay; the rest is that of the new
            ones, to which no updates are added then. By default all updates are kept.
        outer: a function that makes an optimizer of a list of parameters, for which the mean update, from the end of
            the round to its begin, is a gradient. Its parameters have 32 bits or more. By default the mean is added.
        anchor_device: the device of the parameters with which a round began, and of the state of ``outer``: "cpu" to
            have them in the memory of the host. By default it is that of the model.
        decay: from 0 to 1, by which residuals are multiplied before they are added to the next update. With 1 nothing
            is lost, with 0 no residual is kept. The default is what has been best for signs: 0.8 for rounds of one or
            two steps, and 1 for longer ones; for a plan it is that of its units (``feedback``).
        scale_steps: whether steps of ``optimizer`` are made longer, by a factor for each tensor. An optimizer like Adam
            or Muon makes short steps on one rank, because the gradients of a small batch have more noise than those of
            all ranks. The factor is measured in every round, with 68 bytes per tensor. By default it is for all
            optimizers but those of SGD's class, without ``outer``, if there are rounds of at most four steps.
        grad_scaler: the gradient scaler that calls the steps of ``optimizer``, or a list of several. A step that it
            skips on one rank counts there, as an update of zero; its method ``step`` is wrapped for that. Several
            models may share a scaler.
        residual_bits: with 8, residuals of element-wise quantisers take a byte per element instead of four.
        seed: the seed of the stochastic compressors.
        start_step: the number of rounds of one step each that come first, and are averaged exactly.
        process_group: the ranks that average their updates; by default all ranks. For models of ``fully_shard``, one
            rank of each site, all with the same shards.
        exclude: the names of parameters and buffers that each rank has alone, such as its experts. They are left as
            they are, and so is what DDP would ignore in the module
            (``DistributedDataParallel._set_params_and_buffers_to_ignore_for_model``). A plan may have them.

    Returns:
        The attachment. It has the figures and the state for checkpoints; ``close`` ends it.

    Raises:
        TypeError, ValueError, PlanError: an argument is not valid on this rank.
        RuntimeError: an argument is not valid on another rank, or not the same on all of them. Every rank raises.
    """
    if not dist.is_initialized():
        raise RuntimeError("average_updates: torch.distributed is not initialised; call init_process_group first")
    if isinstance(model, DistributedDataParallel):
        model = model.module  # names are those of the module, as elsewhere
    averaging, everyone = UpdatesFrontend.groups(model, process_group)
    auto = of_updates(plan) if isinstance(plan, Auto) else None
    schedule = Schedule(dict(every) if isinstance(every, Mapping) else every, fragments, delay)
    request = UpdatesRequest(
        frontend=Frontend.MODULE,
        group=averaging,
        everyone=everyone,
        device=device_of(model),
        plan=UNCOMPRESSED if isinstance(plan, Auto) else plan,
        residual_bits=residual_bits,
        seed=seed,
        start_step=start_step,
        options=ModuleOptions(process_group, exclude=exclude),
        is_tuned=auto is not None,
        decay=_default_decay(schedule) if decay is None and not isinstance(plan, Plan) else decay,
        given_optimizers=_listed(optimizer),
        schedule=schedule,
        mixing=mixing,
        anchor_device=None if anchor_device is None else torch.device(anchor_device),
        outer=PLAIN_MEAN if outer is None else outer,
        scalers=() if grad_scaler is None else _listed(grad_scaler),
        scale_steps=scale_steps,
        left_out=ranks_own(model, exclude) | without_elements(model),
    )

    def check() -> tuple[Plan, list[str]]:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"average_updates: model must be a torch.nn.Module, got {type(model).__name__}")
        lines = [] if auto is None else auto.lines(start_step)
        checked, more = UpdatesFrontend.checked_plan(model, request)
        return checked, [*more, *lines]

    agreed_plan = agreed("average_updates", everyone, request.device, check)
    end_spent(model)
    attachment = Attachment(UpdatesFrontend(model, agreed_plan, request), request)
    if auto is not None:
        attachment._tune(model, auto, start_step)
    return attachment


def _listed(given: Any) -> list[Any]:
    """The things that an argument lists, or the argument itself if it is no list."""
    return list(given) if isinstance(given, list | tuple) else [given]


def of_updates(auto: Auto) -> Auto:
    """The settings with the compressors that the rule ``"aggressive"`` stands for where updates are averaged: signs
    behind an optimizer lose what safe compressors of gradients lose (``bench/training/updates.py``)."""
    return replace(auto, accuracy=AGGRESSIVE) if auto.accuracy == "aggressive" else auto


def _default_decay(schedule: Schedule) -> float:
    """The decay that has been best for signs (``bench/training/updates.py``)."""
    return 0.8 if schedule.has_rounds_of(_DECAYING) else 1.0
