"""Overrides for torchtitan that attach compression, and save its state with checkpoints.

Its option ``--override.imports`` takes ``gckernels.sync.integrations.torchtitan.compression`` and
``gckernels.sync.integrations.torchtitan.states``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import derive, override

from ..attaching.attach import attach
from .trainer_states import STATE, load_state, save_state, trained


class CompressedOptimizers(OptimizersContainer):
    """The optimizers of a model whose gradients are compressed.

    torchtitan makes them when it has sharded the model and given it values, so that is when they attach.

    Args:
        config: the configuration.
        model_parts: the model, in one part.

    Attributes:
        attachment: the attachment.

    Raises:
        ValueError: pipeline parallelism has cut the model into several parts.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        arguments: dict[str, Any] = field(default_factory=dict)
        """Arguments of ``attach`` besides the model."""

    def __init__(self, config: Config, *, model_parts: list[torch.nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        if len(model_parts) != 1:
            raise ValueError(
                f"compression: pipeline_parallel_degree must be 1, because one model is attached; got "
                f"{len(model_parts)} parts of a model"
            )
        self.attachment = attach(trained("compression", model_parts[0]), **config.arguments)


class CompressedCheckpoints(CheckpointManager):
    """Checkpoints with the state of the attachment of :class:`CompressedOptimizers`, in ``step-N/gckernels``.

    Args:
        config: the configuration.
        optimizers: the optimizers.
        others: as torchtitan gives them.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        allow_missing: bool = False
        """Whether checkpoints without a state are loaded, with a warning."""

    def __init__(self, config: Config, *, optimizers: CompressedOptimizers, **others: Any) -> None:
        super().__init__(config, optimizers=optimizers, **others)
        self._attachment, self._allow_missing = optimizers.attachment, config.allow_missing

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        is_saved: bool = super()._save(curr_step, last_step)
        if is_saved:
            save_state(self._attachment, self._folder(curr_step), f"step {curr_step}")
        return is_saved

    def _load(self, step: int = -1) -> bool:
        found = self._find_load_step() if step == -1 else step
        is_loaded: bool = super()._load(step)
        if is_loaded and found > 0:  # otherwise the weights of another training are loaded
            load_state(self._attachment, self._folder(found), f"step {found}", self._allow_missing)
        return is_loaded

    def _folder(self, step: int) -> Path:
        return Path(self._create_checkpoint_id(step), STATE)


@override(target=OptimizersContainer.Config, exact=True, description="compressed gradients")  # type: ignore[untyped-decorator]
def compression(config: OptimizersContainer.Config, **arguments: Any) -> CompressedOptimizers.Config:
    """The configuration of optimizers that attach to the model.

    Args:
        config: the configuration that torchtitan has.
        arguments: arguments of ``attach`` besides the model, such as ``{"plan": "BlockQuant(bits=4)"}``.
    """
    derived: CompressedOptimizers.Config = derive(config, CompressedOptimizers.Config, arguments=arguments)
    return derived


@override(target=CheckpointManager.Config, exact=True, description="states of compression")  # type: ignore[untyped-decorator]
def states(config: CheckpointManager.Config, allow_missing: bool = False) -> CompressedCheckpoints.Config:
    """The configuration of checkpoints that have the state of the attachment.

    Args:
        config: the configuration that torchtitan has.
        allow_missing: load checkpoints without a state, with a warning.
    """
    derived: CompressedCheckpoints.Config = derive(config, CompressedCheckpoints.Config, allow_missing=allow_missing)
    return derived
