"""Compression in trainings with Accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from gckernels.compressor import Compressor

from ..attaching.attachment import Attachment
from ..plans.plan import Plan
from ..tuning.auto import Auto
from .trainer_states import SAFE, STATE, attached, load_state, save_state, trained


def compress(
    accelerator: Accelerator,
    model: torch.nn.Module,
    plan: Plan | Compressor | str | Auto = SAFE,
    *,
    allow_missing: bool = False,
    **settings: Any,
) -> Attachment:
    """The attachment of a model that ``accelerator.prepare`` has returned, with DDP or FSDP2. Every rank calls it::

        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        attachment = compress(accelerator, model)

    It is :func:`gckernels.sync.attach` with the gradient scaler of the accelerator. The state of all ranks is saved by
    ``accelerator.save_state`` in its folder, as ``gckernels``, or ``gckernels_1`` for the second model, and is loaded
    by ``accelerator.load_state``, which is called after this function.

    Args:
        accelerator: the accelerator.
        model: the model.
        plan: the second argument of ``attach``.
        allow_missing: load folders without a state, with a warning.
        settings: further arguments of ``attach``.

    Raises:
        ValueError: the accelerator has not prepared the model.
        TypeError: neither DDP nor FSDP2 averages its gradients, as in a process alone.
    """
    inner = trained("compress", model)
    prepared = (model, inner, getattr(inner, "module", None))  # the accelerator keeps that in DDP
    number = next((at for at, each in enumerate(accelerator._models) if any(each is one for one in prepared)), None)
    if number is None:
        raise ValueError("compress: model must be one that accelerator.prepare has returned, got another one")
    name = f"{STATE}_{number}" if number else STATE
    attachment = attached("compress", model, plan, accelerator.scaler, settings)

    def save(models: Any, weights: Any, folder: str) -> None:
        save_state(attachment, Path(folder, name))

    def load(models: Any, folder: str) -> None:
        load_state(attachment, Path(folder, name), allow_missing=allow_missing)

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return attachment
