"""Compression in the ``Trainer`` of Transformers."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..attaching.attachment import Attachment
from ..attaching.updates import Updates
from .trainer_states import SAFE, STATE, How, attached, load_state, metrics, save_state

_IN_COMMON = ("evaluation_loop", "save_model")
"""The methods of a trainer that are to have the model that all ranks share. No callback is called before them."""


class Compression(TrainerCallback):
    """Compresses what the ranks of a ``Trainer`` send, with DDP or FSDP2::

        trainer = Trainer(model, args, train_dataset=data, callbacks=[Compression()])
        trainer = Trainer(model, args, train_dataset=data, callbacks=[Compression(sync.Updates(every=2))])

    It calls :func:`gckernels.sync.attach` when a training begins, with the gradient scaler that the trainer has. The
    state of all ranks is saved in ``checkpoint-N/gckernels``, which the trainer deletes with the checkpoint, and is
    loaded when a training is resumed. The numbers of ``stats()`` are among the logs of losses, from ``gckernels/step``
    to ``gckernels/decisions``. A process alone, without ``torch.distributed``, trains as without it.

    The attachment is closed when a training ends, so that other trainers can train the model; its figures and its
    report stay. One object may be given to several trainers that train one after the other.

    With :class:`~gckernels.sync.Updates` the optimizer is that of the trainer. Inside a round evaluations and saved
    models have the parameters that all ranks share, and a round ends with the training.

    Args:
        how: the second argument of ``attach``.
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
        how: How = SAFE,
        *,
        resume_from: str | os.PathLike[str] | None = None,
        allow_missing: bool = False,
        **settings: Any,
    ) -> None:
        self._how, self._settings = how, settings
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
        own = trainer.model_wrapped, self._how, [trainer.optimizer], trainer.accelerator.scaler, self._settings
        self.attachment = attached("Compression", *own)
        if isinstance(self._how, Updates):
            for name in _IN_COMMON:
                if not isinstance(method := getattr(trainer, name), _InCommon) or method.callback is not self:
                    setattr(trainer, name, _InCommon(self, method))
        if state.global_step:
            folder = _checkpoint(args, state) if self._resume_from is None else Path(self._resume_from)
            load_state(self.attachment, folder / STATE, _named(state), self._allow_missing)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """End the attachment, behind the mean of a last round unless the model is now the best of the checkpoints."""
        if self.attachment is not None:
            if not args.load_best_model_at_end or state.best_model_checkpoint is None:
                self.attachment.end_round()
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


class _InCommon:
    """A method of a trainer that has the model that all ranks share, as long as a callback has an open attachment.

    Args:
        callback: the callback.
        method: the method.
    """

    def __init__(self, callback: Compression, method: Callable[..., Any]) -> None:
        self.callback, self._method = callback, method

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        attachment = self.callback.attachment
        with contextlib.nullcontext() if attachment is None else attachment.shared():
            return self._method(*arguments, **named)


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")


def _named(state: TrainerState) -> str:
    """The step of a checkpoint and a digest of its logs, which another training of as many steps does not have."""
    history = json.dumps(state.log_history, sort_keys=True, default=str).encode()
    return f"step {state.global_step}, logs {hashlib.blake2b(history, digest_size=8).hexdigest()}"
