"""The parts that all trainers share: the model that is attached, the folder of its state, and figures for loggers.

A state lies in a folder beside, or in, the checkpoint of the trainer. All ranks write it together, as
``torch.distributed.checkpoint`` does, so all of them need the same file system.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from gckernels.compressor import Compressor

from ..attaching.attach import attach
from ..attaching.attachment import Attachment
from ..attaching.updates import Updates
from ..communication.agreement import agreed, device_of
from ..frontends.checks.optimizer_checks import unwrapped
from ..frontends.kinds import kind_of
from ..plans.plan import Frontend, Plan
from ..stats.decisions import LOGGER
from ..tuning.auto import Auto

How: TypeAlias = Plan | Compressor | str | Auto | Updates
"""The second argument of ``attach``."""
SAFE = Auto()
"""The second argument where a trainer is given none."""
STATE = "gckernels"
"""The name of the folder of a state, and of the state in it."""
SUFFIX = ".gckernels"
"""The end of the name of the folder beside a checkpoint that is a file."""
_WHOLE = ".metadata"
"""The file that is written last, when the state is whole."""
_CHECKPOINT = "checkpoint"


def trained(caller: str, model: torch.nn.Module) -> torch.nn.Module:
    """The model to attach, which averages gradients, without the wrapper of a compiler.

    Args:
        caller: the name of the caller, for errors.
        model: the model as the trainer has prepared it.

    Raises:
        TypeError: neither DDP nor FSDP2 averages its gradients. Attached as a bare module it would be averaged twice if
            something else does.
    """
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, torch.nn.Module) or not kind_of(inner).traits.is_wrapped:
        raise TypeError(
            f"{caller}: model must be a DistributedDataParallel model or one of fully_shard when training begins, got "
            f"{type(inner).__name__}"
        )
    return inner


def attached(
    caller: str,
    model: torch.nn.Module,
    how: How,
    optimizers: Iterable[Any],
    scaler: GradScaler | None,
    settings: dict[str, Any],
) -> Attachment:
    """The attachment of the model that a trainer trains, with the optimizers and the gradient scaler of the trainer.

    Args:
        caller: the name of the caller, for errors.
        model: the model as the trainer has prepared it.
        how: the second argument of ``attach``; an :class:`~gckernels.sync.Updates` needs no optimizer.
        optimizers: the optimizers of the trainer, of which those of the model are given to an ``Updates``.
        scaler: the gradient scaler; ``None`` if there is none.
        settings: further arguments of ``attach``.

    Raises:
        TypeError: the model is not wrapped.
        ValueError: updates shall be averaged, and each rank has other shards of the model.
    """
    inner = trained(caller, model)
    if isinstance(how, Updates):
        if kind_of(inner) == Frontend.FSDP and "process_group" not in settings and dist.get_world_size() > 1:
            raise ValueError(
                f"{caller}: updates are averaged between ranks that have the same parameters, and each rank has a part "
                "of the model by fully_shard; let the model have replicas (HSDP), or be in DistributedDataParallel"
            )
        if how.optimizer is None:
            how = replace(how, optimizer=stepping(inner, optimizers))
    given = {} if scaler is None else {"grad_scaler": scaler}
    return attach(inner, how, **given | settings)


def stepping(model: torch.nn.Module, optimizers: Iterable[Any]) -> list[torch.optim.Optimizer]:
    """The optimizers of a trainer that have parameters of a model, without the wrappers of Accelerate."""
    ids = {id(each) for each in model.parameters()}
    found = map(unwrapped, optimizers)
    return [one for one in found if any(id(each) in ids for group in one.param_groups for each in group["params"])]


def save_state(attachment: Attachment, folder: str | os.PathLike[str], checkpoint: str = "") -> None:
    """Write the state of an attachment into a folder, which is made, unless the attachment has been closed. Every rank
    calls it with the same folder.

    Args:
        attachment: the attachment.
        folder: the folder.
        checkpoint: a text by which the checkpoint of the trainer is known; that of rank 0 counts.
    """
    if not attachment._frontend.is_open:
        return
    group, is_first = dist.distributed_c10d._get_default_group(), dist.get_rank() == 0

    def remove() -> tuple[bool, list[str]]:
        if is_first:
            Path(folder, _WHOLE).unlink(missing_ok=True)
        return True, [f"the state in {folder}"]

    agreed("save_state", group, device_of(None), remove)  # an older state is not whole while it is replaced
    state: dict[str, object] = {STATE: attachment.checkpoint()}
    save(state | ({_CHECKPOINT: checkpoint} if is_first else {}), checkpoint_id=folder)


def load_state(
    attachment: Attachment, folder: str | os.PathLike[str], checkpoint: str = "", allow_missing: bool = False
) -> None:
    """Continue from the state that :func:`save_state` has written, by as many ranks or by another number. Every rank
    calls it, after ``attach`` and before the next step. Nothing happens if the attachment has been closed.

    Args:
        attachment: the attachment.
        folder: the folder.
        checkpoint: the text that was given to :func:`save_state`, of the checkpoint that is loaded now.
        allow_missing: go on without a state if there is none. The part that had not been sent is lost then, and a
            warning says so.

    Raises:
        FileNotFoundError: there is no state, or not a whole one. Other ranks raise a RuntimeError if they have one.
        ValueError: the state is that of another checkpoint, or does not fit the plan. Nothing has been changed.
    """
    if not attachment._frontend.is_open:
        return

    def find() -> tuple[str, list[str]]:
        found = "a state" if Path(folder, _WHOLE).is_file() else "no state"
        if found == "no state" and not allow_missing:
            raise FileNotFoundError(
                f"load_state: folder {folder} has no whole state of gckernels, so what the checkpoint had not sent yet "
                "would be lost; give the folder of the state, or allow_missing=True to go on without it"
            )
        return found, [f"{found} in {folder}"]

    group = dist.distributed_c10d._get_default_group()
    if agreed("load_state", group, device_of(None), find) == "no state":
        if dist.get_rank() == 0:
            text = "gckernels: no state in %s; training goes on without what the checkpoint had not sent yet"
            LOGGER.warning(text, folder)
        begin_anew(attachment)
        return
    head = {_CHECKPOINT: ""}
    load(head, checkpoint_id=folder)
    if head[_CHECKPOINT] != checkpoint:
        raise ValueError(
            f"load_state: folder {folder} has the state of another checkpoint: {head[_CHECKPOINT] or 'no name'}, in "
            f"place of {checkpoint or 'no name'}"
        )
    load({STATE: attachment.checkpoint(reads=folder)}, checkpoint_id=folder)


def begin_anew(attachment: Attachment) -> None:
    """Let an attachment that averages updates begin with the parameters that the trainer has loaded before the first
    step. Every rank calls it."""
    if (elastic := attachment._frontend.elastic) is not None:
        elastic.begin_anew()


def metrics(attachment: Attachment) -> dict[str, float]:
    """The numbers of :meth:`~gckernels.sync.Attachment.stats` by names that begin with ``gckernels/``."""
    return {f"{STATE}/{name}": each for name, each in attachment.stats().items() if not isinstance(each, str)}
