"""Compression in the ``Trainer`` of Transformers."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import weakref
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from gckernels.compressor import Compressor

from ..attaching.attachment import Attachment
from ..plans.plan import Plan
from ..tuning.auto import Auto
from .trainer_states import SAFE, STATE, attached, load_state, metrics, save_state


class Compression(TrainerCallback):
    """Compresses the gradients of a ``Trainer``, with DDP or FSDP2::

        trainer = Trainer(model, args, train_dataset=data, callbacks=[Compression()])

    It calls :func:`gckernels.sync.attach` when a training begins, with the gradient scaler that the trainer has. The
    state of all ranks is saved in ``checkpoint-N/gckernels``, which the trainer deletes with the checkpoint, and is
    loaded when a training is resumed. The numbers of ``stats()`` are among the logs of losses, from ``gckernels/step``
    to ``gckernels/decisions``. A process alone, without ``torch.distributed``, trains as without it.

    The attachment is closed when a training ends, so that other trainers can train the model; its figures and its
    report stay. One object may be given to several trainers that train one after the other.

    Args:
        plan: the second argument of ``attach``.
        resume_from: the checkpoint of ``trainer.train(resume_from_checkpoint=...)``, if it is not
            ``checkpoint-N`` in the ``output_dir`` of the trainer.
        allow_missing: resume from a checkpoint without a state, with a warning.
        settings: further arguments of ``attach``.

    Attributes:
        attachment: the attachment of the last training; ``None`` before the first.
    """

    _every: ClassVar[weakref.WeakSet[Compression]] = weakref.WeakSet()

    def __init__(
        self,
        plan: Plan | Compressor | str | Auto = SAFE,
        *,
        resume_from: str | os.PathLike[str] | None = None,
        allow_missing: bool = False,
        **settings: Any,
    ) -> None:
        self._plan, self._settings = plan, settings
        self._resume_from, self._allow_missing = resume_from, allow_missing
        self.attachment: Attachment | None = None
        self._every.add(self)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Attach to the model that the trainer has wrapped, and load its state if the training is resumed.

        Raises:
            FileNotFoundError: the checkpoint has no state.
            ValueError: the state is that of another checkpoint, or the trainer searches for hyperparameters.
        """
        if self.attachment is not None:  # a training before may have been interrupted
            self.attachment.close()
            self.attachment = None
        if not dist.is_initialized():
            return
        if state.is_hyper_param_search:
            raise ValueError("Compression: a search for hyperparameters is not supported; train without this callback")
        trainer = self._trainer(state)
        self._end_interrupted(trainer.model_wrapped)
        scaler = trainer.accelerator.scaler
        self.attachment = attached("Compression", trainer.model_wrapped, self._plan, scaler, self._settings)
        if state.global_step:
            folder = _checkpoint(args, state) if self._resume_from is None else Path(self._resume_from)
            load_state(self.attachment, folder / STATE, _named(state), self._allow_missing)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """End the attachment."""
        if self.attachment is not None:
            self.attachment.close()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Save the state in the checkpoint that the trainer has written."""
        if self.attachment is not None and not args.save_only_model:
            save_state(self.attachment, _checkpoint(args, state) / STATE, _named(state))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **_: Any,
    ) -> None:
        """Add figures to the logs of a loss."""
        if self.attachment is not None and logs is not None and "loss" in logs:
            figures = metrics(self.attachment)
            logs |= figures
            state.log_history[-1] |= figures

    def _end_interrupted(self, model: torch.nn.Module) -> None:
        """Close what other trainings of a model have left, which an exception has ended."""
        parameters = {id(each) for each in model.parameters()}
        for other in list(self._every):
            attachment = other.attachment
            if attachment is not None and any(id(each) in parameters for each in attachment.parameters().values()):
                attachment.close()

    def _trainer(self, state: TrainerState) -> Trainer:
        """The trainer with a state, which then calls this callback before those that report logs elsewhere.

        Callbacks are given the model before it was wrapped, and not the trainer, so the objects of the garbage
        collector are searched. Other trainers may have this callback as well, and each has a state of its own.
        """
        for each in gc.get_objects():
            if not issubclass(type(each), Trainer) or getattr(each, "state", None) is not state:
                continue
            handler = getattr(each, "callback_handler", None)
            if handler is not None and self in handler.callbacks:
                handler.callbacks.remove(self)
                handler.callbacks.insert(0, self)
                return each
        raise RuntimeError("Compression: its trainer is not found; call gc.freeze() later than trainer.train()")


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


def _named(state: TrainerState) -> str:
    """The step of a checkpoint and a digest of its logs, which another training of as many steps does not have."""
    history = json.dumps(state.log_history, sort_keys=True, default=str).encode()
    return f"step {state.global_step}, logs {hashlib.blake2b(history, digest_size=8).hexdigest()}"
