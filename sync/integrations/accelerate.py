"""Compression in trainings with Accelerate."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from ..attaching.attachment import Attachment
from ..attaching.updates import Updates
from ..stats.decisions import LOGGER
from .trainer_states import SAFE, STATE, How, attached, load_state, save_state, stepping, trained

_BEGUN = (
    "gckernels: compress: an optimizer or a learning rate of this model has made steps already, and what had not been "
    "sent by then is missing; call accelerator.load_state after compress, so that it comes with the checkpoint"
)


def compress(
    accelerator: Accelerator,
    model: torch.nn.Module,
    how: How = SAFE,
    *,
    allow_missing: bool = False,
    **settings: Any,
) -> Attachment:
    """The attachment of a model that ``accelerator.prepare`` has returned, with DDP or FSDP2. Every rank calls it::

        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        attachment = compress(accelerator, model)
        attachment = compress(accelerator, model, sync.Updates(every=2))

    It is :func:`gckernels.sync.attach` with the gradient scaler of the accelerator. The state of all ranks is saved by
    ``accelerator.save_state`` in its folder, as ``gckernels``, or ``gckernels_1`` for the second model, and is loaded
    by ``accelerator.load_state``, which is called after this function. A warning says so if the optimizer of the model
    has made steps already. With :class:`~gckernels.sync.Updates` the optimizers are those that have been prepared and
    step the model.

    Args:
        accelerator: the accelerator.
        model: the model.
        how: the second argument of ``attach``.
        allow_missing: load folders without a state, with a warning.
        settings: further arguments of ``attach``.

    Raises:
        ValueError: the accelerator has not prepared the model.
        TypeError: neither DDP nor FSDP2 averages its gradients, as in a process alone.
    """
    inner = trained("compress", model)
    prepared = (model, inner, getattr(inner, "module", None))  # the accelerator keeps that in DDP
    kept = next((each for each in accelerator._models if any(each is one for one in prepared)), None)
    if kept is None:
        raise ValueError("compress: model must be one that accelerator.prepare has returned, got another one")
    has_begun = _has_begun(accelerator, inner)
    attachment = attached("compress", model, how, accelerator._optimizers, accelerator.scaler, settings)
    if has_begun and dist.get_rank() == 0:
        LOGGER.warning(_BEGUN)
    model_of = weakref.ref(kept)

    def name() -> str | None:
        """The name of the state, after the number of the model, which ``free_memory`` may have taken away."""
        number = next((at for at, each in enumerate(accelerator._models) if each is model_of()), None)
        return None if number is None else f"{STATE}_{number}" if number else STATE

    def save(models: Any, weights: Any, folder: str) -> None:
        if (found := name()) is not None:
            save_state(attachment, Path(folder, found))

    # the state of updates has the parameters and optimizers of this rank, so those of the accelerator come first
    last = stepping(inner, accelerator._optimizers)[-1:] if isinstance(how, Updates) else []
    waiting: list[Path] = []

    def load(models: Any, folder: str) -> None:
        waiting.clear()
        if (found := name()) is not None:
            waiting.append(Path(folder, found))
            if not models or not last:
                load_now()

    def load_now(*_: Any) -> None:
        if waiting:
            load_state(attachment, waiting.pop(), allow_missing=allow_missing)

    for optimizer in last:
        optimizer.register_load_state_dict_post_hook(load_now)
    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return attachment


def _has_begun(accelerator: Accelerator, model: torch.nn.Module) -> bool:
    """Whether an optimizer of a model, or a learning rate, has made steps, here or in a checkpoint that was loaded."""
    parameters = {id(each) for each in model.parameters()}
    optimizers = [getattr(each, "optimizer", each) for each in accelerator._optimizers]
    schedulers = [getattr(each, "scheduler", each) for each in accelerator._schedulers]
    return any(id(each) in parameters and state for one in optimizers for each, state in one.state.items()) or any(
        getattr(each, "last_epoch", 0) > 0 for each in schedulers
    )
