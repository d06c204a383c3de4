"""Overrides for torchtitan that attach compression, and save its state with checkpoints.

Its option ``--override.imports`` takes names in ``gckernels.sync.integrations.torchtitan``: ``compression`` or
``updates``, with ``states``, and ``figures``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import derive, override

from ..attaching.updates import Updates
from ..frontends.checks.hooks import ModelHook, weakly
from .trainer_states import SAFE, STATE, attached, begin_anew, load_state, metrics, save_state


class CompressedOptimizers(OptimizersContainer):
    """The optimizers of a model whose gradients are compressed, or whose updates are averaged in their place.

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
        updates: dict[str, Any] | None = None
        """Arguments of ``Updates`` besides the optimizers; ``None`` to average gradients."""

    def __init__(self, config: Config, *, model_parts: list[torch.nn.Module]) -> None:
        super().__init__(config, model_parts=model_parts)
        if len(model_parts) != 1:
            raise ValueError(
                f"compression: pipeline_parallel_degree must be 1, because one model is attached; got "
                f"{len(model_parts)} parts of a model"
            )
        settings = {"how": SAFE if config.updates is None else Updates(**config.updates)} | config.arguments
        self.attachment = attached("compression", model_parts[0], settings.pop("how"), self.optimizers, None, settings)
        if config.updates is not None:
            model_parts[0].register_forward_pre_hook(ModelHook(weakly(self._refuse_evaluation)))

    def _refuse_evaluation(self, model: torch.nn.Module, *_: Any) -> None:
        """Raise a RuntimeError if the model is evaluated where each rank has another one."""
        if not model.training and self.attachment.is_inside_round:
            raise RuntimeError(
                "updates: the model is evaluated inside a round, where each replica has another one; let the steps "
                "between two evaluations (--validator.freq) be a multiple of those of a round, and fragments be 1"
            )


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
        if last_step:
            self._attachment.end_round()
        with self._attachment.shared():
            is_saved: bool = super()._save(curr_step, last_step)
            if self._attachment.is_inside_round:
                self.maybe_wait_for_staging()
        if is_saved:
            save_state(self._attachment, self._folder(curr_step), f"step {curr_step}")
        return is_saved

    def _load(self, step: int = -1) -> bool:
        found = self._find_load_step() if step == -1 else step
        is_loaded: bool = super()._load(step)
        if is_loaded and found > 0:
            load_state(self._attachment, self._folder(found), f"step {found}", self._allow_missing)
        elif is_loaded:  # the weights of another training
            begin_anew(self._attachment)
        return is_loaded

    def _folder(self, step: int) -> Path:
        return Path(self._create_checkpoint_id(step), STATE)


class CompressionMetrics(MetricsProcessor):
    """Metrics with the figures of the attachment of :class:`CompressedOptimizers`."""

    @dataclass(kw_only=True, slots=True)
    class Config(MetricsProcessor.Config):
        pass

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        figures = metrics(self.optimizers.attachment)
        super().log(step, global_avg_loss, global_max_loss, grad_norm, (extra_metrics or {}) | figures)


@override(target=OptimizersContainer.Config, exact=True, description="compressed gradients")  # type: ignore[untyped-decorator]
def compression(config: OptimizersContainer.Config, **arguments: Any) -> CompressedOptimizers.Config:
    """The configuration of optimizers that attach to the model.

    Args:
        config: the configuration that torchtitan has.
        arguments: arguments of ``attach`` besides the model, such as ``{"how": "BlockQuant(bits=4)"}``.
    """
    derived: CompressedOptimizers.Config = derive(config, CompressedOptimizers.Config, arguments=arguments)
    return derived


@override(target=OptimizersContainer.Config, exact=True, description="averaged updates")  # type: ignore[untyped-decorator]
def updates(
    config: OptimizersContainer.Config, attach: dict[str, Any] | None = None, **arguments: Any
) -> CompressedOptimizers.Config:
    """The configuration of optimizers whose updates are averaged between the replicas of the model.

    Args:
        config: the configuration that torchtitan has.
        attach: further arguments of ``attach``.
        arguments: arguments of ``Updates`` besides the optimizers, such as ``{"every": 2, "plan": "EFSignSGD"}``.
            ``every`` may have texts as keys, as in JSON, and ``outer`` the arguments of an SGD.
    """
    if isinstance(every := arguments.get("every"), dict):
        arguments["every"] = {int(begin): steps for begin, steps in every.items()}
    if isinstance(outer := arguments.get("outer"), dict):
        arguments["outer"] = functools.partial(torch.optim.SGD, **outer)
    given = {"arguments": attach or {}, "updates": arguments}
    derived: CompressedOptimizers.Config = derive(config, CompressedOptimizers.Config, **given)
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


@override(target=MetricsProcessor.Config, exact=True, description="figures of compression")  # type: ignore[untyped-decorator]
def figures(config: MetricsProcessor.Config) -> CompressionMetrics.Config:
    """The configuration of metrics that have the figures of the attachment.

    Args:
        config: the configuration that torchtitan has.
    """
    derived: CompressionMetrics.Config = derive(config, CompressionMetrics.Config)
    return derived
