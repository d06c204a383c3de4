"""Checkpoints of trainings in Lightning Fabric, whose models :func:`gckernels.sync.attach` takes as they are."""

from __future__ import annotations

import os
from typing import Any

from ..attaching.attachment import Attachment
from .trainer_states import SUFFIX, load_state, save_state


def save(fabric: Any, path: str | os.PathLike[str], state: dict[str, Any], attachment: Attachment) -> None:
    """Save a checkpoint as ``fabric.save`` does, and the state of an attachment in a folder beside it, with
    ``.gckernels`` behind its name. Every rank calls it.

    Inside a round of :class:`~gckernels.sync.Updates` the checkpoint has the model that all ranks share.

    Args:
        fabric: the ``lightning.fabric.Fabric``.
        path: the path of the checkpoint; that of rank 0 counts.
        state: the second argument of ``fabric.save``.
        attachment: the attachment.
    """
    path = fabric.broadcast(path)
    with attachment.shared():
        fabric.save(path, state)
    save_state(attachment, f"{os.fspath(path)}{SUFFIX}")


def load(
    fabric: Any,
    path: str | os.PathLike[str],
    state: dict[str, Any],
    attachment: Attachment,
    *,
    allow_missing: bool = False,
) -> dict[str, Any]:
    """Load a checkpoint as ``fabric.load`` does, and then the state that :func:`save` has written beside it. Every rank
    calls it, before the next step.

    Args:
        fabric: the ``lightning.fabric.Fabric``.
        path: the path of the checkpoint; that of rank 0 counts.
        state: the second argument of ``fabric.load``.
        attachment: the attachment.
        allow_missing: load checkpoints without a state, with a warning.

    Returns:
        The rest of the checkpoint, as from ``fabric.load``.

    Raises:
        FileNotFoundError: the checkpoint has no state.
    """
    path = fabric.broadcast(path)
    rest: dict[str, Any] = fabric.load(path, state)
    load_state(attachment, f"{os.fspath(path)}{SUFFIX}", allow_missing=allow_missing)
    return rest
