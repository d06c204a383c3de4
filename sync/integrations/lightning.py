"""Compression in Lightning."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn

from ..attaching.attachment import Attachment
from ..attaching.updates import Updates
from ..frontends.updates.optimizer_states import copied
from .trainer_states import SAFE, SUFFIX, How, attached, load_state, metrics, save_state

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy
else:
    Strategy = object


class _Compressed(Strategy):
    """The part that both strategies share, in front of one of Lightning's."""

    attachment: Attachment | None = None
    """The attachment of the training that runs; ``None`` outside of one."""

    def __init__(
        self,
        how: How = SAFE,
        *,
        allow_missing: bool = False,
        settings: dict[str, Any] | None = None,
        **strategy: Any,
    ) -> None:
        super().__init__(**strategy)
        self._how, self._settings, self._allow_missing = how, settings or {}, allow_missing
        self._evaluation = contextlib.ExitStack()  # in which the model is the one that all ranks share
        self._resumed: tuple[str, str] | None = None  # the folder of a state that is to be loaded, and its checkpoint

    def setup(self, trainer: pl.Trainer) -> None:
        """Attach to the model when Lightning has wrapped it for a training."""
        super().setup(trainer)
        self._end()  # a training may not have come to its end
        if trainer.state.fn == TrainerFn.FITTING:
            scaler = getattr(self.precision_plugin, "scaler", None)
            own = self.model, self._how, self.optimizers, scaler, self._settings
            self.attachment = attached(type(self).__name__, *own)
            if isinstance(self._how, Updates):
                self._forward_redirection = _ForwardRedirection()  # DDP's wakes it behind a manual step
            self._resume()

    def load_checkpoint(self, checkpoint_path: str | os.PathLike[str], *options: Any, **named: Any) -> dict[str, Any]:
        """Load a checkpoint, and the state beside it if a training is resumed."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, *options, **named)
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.fn == TrainerFn.FITTING:
            self._resumed = f"{os.fspath(checkpoint_path)}{SUFFIX}", _named(checkpoint)
            self._resume()
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizers, and then the state of updates, which has those of this rank."""
        super().load_optimizer_state_dict(checkpoint)
        self._resume(has_optimizers=True)

    def _resume(self, has_optimizers: bool = False) -> None:
        """Load a state once there is an attachment: strategies load checkpoints before or after they wrap the model.
        The state of updates has the parameters and optimizers of this rank, so those of Lightning come before."""
        waits = isinstance(self._how, Updates) and self.lightning_restore_optimizer and not has_optimizers
        if self.attachment is not None and self._resumed is not None and not waits:
            (folder, checkpoint), self._resumed = self._resumed, None
            load_state(self.attachment, folder, checkpoint, self._allow_missing)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The parameters for a checkpoint: with updates those that all ranks share."""
        with self._shared():
            state: dict[str, Any] = super().lightning_module_state_dict()
            return copied(state) if isinstance(self._how, Updates) else state

    def _shared(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.attachment is None else self.attachment.shared()

    def on_validation_start(self) -> None:
        """Validate the model that all ranks share."""
        super().on_validation_start()
        self._evaluation.enter_context(self._shared())

    def on_validation_end(self) -> None:
        """Go on with the model of this rank."""
        self._evaluation.close()
        super().on_validation_end()

    def on_train_end(self) -> None:
        """Average what a last round of updates has changed."""
        super().on_train_end()
        if self.attachment is not None:
            self.attachment.end_round()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint, and the state beside it unless it has weights alone."""
        name, is_resumable = _named(checkpoint), "optimizer_states" in checkpoint
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.attachment is not None and is_resumable:
            save_state(self.attachment, self.broadcast(f"{os.fspath(filepath)}{SUFFIX}"), name)

    def remove_checkpoint(self, filepath: str | os.PathLike[str]) -> None:
        """Remove a checkpoint with its state."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(f"{os.fspath(filepath)}{SUFFIX}", ignore_errors=True)

    def teardown(self) -> None:
        """End the attachment with the training."""
        self._end()
        self._resumed = None
        super().teardown()

    def _end(self) -> None:
        self._evaluation.close()
        if self.attachment is not None:
            self.attachment.close()
            self.attachment = None


class CompressedDDPStrategy(_Compressed, DDPStrategy):
    """DDP with compressed gradients, or with averaged updates in their place::

        trainer = Trainer(strategy=CompressedDDPStrategy())
        trainer = Trainer(strategy=CompressedDDPStrategy(sync.Updates(every=2)))

    It calls :func:`gckernels.sync.attach` when the model is wrapped for a training, with the gradient scaler of the
    precision. The state of all ranks is saved in a folder beside each checkpoint, with ``.gckernels`` behind its name,
    loaded with it, and removed with it.

    With :class:`~gckernels.sync.Updates` the optimizers are those of the training. Inside a round, validations and
    checkpoints have the parameters that all ranks share, and a round ends with the training.

    Args:
        how: the second argument of ``attach``.
        allow_missing: resume from a checkpoint without a state, with a warning.
        settings: further arguments of ``attach``, by name.
        strategy: arguments of ``DDPStrategy``.
    """


class CompressedModelParallelStrategy(_Compressed, ModelParallelStrategy):
    """Models that ``configure_model`` has sharded with ``fully_shard``, with compressed gradients.

    Its arguments and states are those of :class:`CompressedDDPStrategy`; ``strategy`` are arguments of
    ``ModelParallelStrategy``.
    """


class CompressionStats(pl.Callback):
    """Logs the numbers of ``stats()`` with the logger of the trainer, from ``gckernels/step`` to
    ``gckernels/decisions``, every ``log_every_n_steps`` steps."""

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """Log figures if they are due."""
        attachment = getattr(trainer.strategy, "attachment", None)
        if attachment is not None and trainer.global_step % trainer.log_every_n_steps == 0:
            for logger in trainer.loggers:
                logger.log_metrics(metrics(attachment), step=trainer.global_step)


def _named(checkpoint: dict[str, Any]) -> str:
    return f"epoch {checkpoint.get('epoch')}, step {checkpoint.get('global_step')}"
