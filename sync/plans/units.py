"""Units of a plan: a compressor and a program for a parameter, a part of one, or several together."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from gckernels.codec import Codec
from gckernels.compressor import Compressor, from_json
from gckernels.ops import Identity

from ..programs.named import ALLREDUCE, REDUCE_SCATTER, REDUCE_SCATTER_OF_LEVELS, default_program
from ..programs.spans import SHARD, Span
from ..programs.steps import Program, program_from_json, program_to_json
from .arguments import plain_name
from .json_files import Entry
from .json_records import JsonForm, from_value

MAX_CHANNELS = 64  # each channel has its own process groups and lanes


class PlanError(ValueError):
    """A plan that is not valid or does not fit the model; the message lists everything that is wrong."""


def _read_feedback(entry: Entry) -> float:
    """The value of an entry: true, false, or a number from 0 to 1."""
    return entry.value if isinstance(entry.value, bool) else entry.number(most=1.0)


def _write_feedback(feedback: float) -> float:
    return bool(feedback) if feedback in (0, 1) else feedback


@dataclass(frozen=True)
class UnitPlan:
    """How a unit is synchronised: one parameter, a part of one, or several parameters as one vector.

    Attributes:
        parameter: the name of the parameter in the model. Prefixes of torch.compile are removed, so that a plan fits a
            model whether it is compiled or not.
        numel: the number of elements of the unit, in real numbers. A complex element counts as two, its real part
            first.
        compressor: the method that encodes the unit, fitted to its shape.
        program: the steps that synchronise the unit.
        feedback: the part of the compression error that is added to the next gradient, from 0 to 1. With 0 or False no
            error is kept; with 1 or True nothing is lost. A number between them is the decay of residuals, by which
            they are multiplied before each compressed step.
        start: the first element of a part, in the order in which the parameter lies in memory; ``None`` for a whole
            parameter.
        root: the rank that is the root of the unit's collectives; on other levels, the rank in the same place.
        also: names of parameters that are merged with the first one, behind it in this order. They share statistics
            such as a scale or a threshold. A bare module lays them out side by side; DDP's buckets may not.
        launch: the launch of the unit, or ``None`` for launches by size. Units with equal numbers lie in one vector,
            which a bare module launches as soon as it is complete and all launches of smaller numbers have been
            launched. DDP launches its own buckets.
        message: the number of its message, which no message of another launch or channel has. Units of a launch, or of
            a bucket of DDP, with equal numbers share a message if program, root and dtype of added payloads are equal.
            Units with different numbers never do. Units with ``None`` share theirs with one another, but a part of a
            parameter is a message by itself.
        channel: the channel of the message; ``None`` for channels in turn. Units with different ones never share a
            message. Only messages of compressors have channels.

    Raises:
        PlanError: ``feedback`` is no number from 0 to 1, or ``launch``, ``message`` or ``channel`` is neither ``None``
            nor a valid number.
    """

    parameter: str
    numel: int
    compressor: Annotated[Compressor, JsonForm(from_value(from_json), Compressor.to_json)]
    program: Annotated[Program, JsonForm(from_value(program_from_json), program_to_json)]
    feedback: Annotated[float, JsonForm(_read_feedback, _write_feedback)]
    start: int | None = None
    root: int = 0
    also: tuple[str, ...] = ()
    launch: int | None = None
    message: int | None = None
    channel: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameter", plain_name(self.parameter))
        if self.also:
            object.__setattr__(self, "also", tuple(map(plain_name, self.also)))
        if not isinstance(self.feedback, int | float) or not 0 <= self.feedback <= 1:
            raise PlanError(f"plan: {self.key}: feedback must be a number from 0 to 1, got {self.feedback!r}")
        numbers = (("launch", self.launch, None), ("message", self.message, None))
        for name, value, limit in (*numbers, ("channel", self.channel, MAX_CHANNELS)):
            if value is not None and (type(value) is not int or value < 0 or (limit is not None and value >= limit)):
                allowed = "up" if limit is None else f"to {limit - 1}"
                raise PlanError(f"plan: {self.key}: {name} must be None or an int from 0 {allowed}, got {value!r}")

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of all parameters in the unit."""
        return (self.parameter, *self.also)

    @property
    def key(self) -> str:
        """The name of the unit, under which its residuals are kept: ``"layer.weight"``, for a part
        ``"layer.weight[0:4096]"``, for merged parameters ``"layer.weight+layer.bias"``."""
        part = "" if self.start is None else f"[{self.start}:{self.start + self.numel}]"
        return "+".join(self.parameters) + part

    @property
    def in_place(self) -> bool:
        """Whether the unit is averaged where it lies, without compression, or reduced to shards by FSDP2 itself."""
        return self.program in (ALLREDUCE, REDUCE_SCATTER, REDUCE_SCATTER_OF_LEVELS)

    def has_residual(self, kind: str) -> bool:
        """Whether an encoding of the unit keeps a residual.

        The encoding of a shard that has another compressor keeps one only if that compressor needs feedback.

        Args:
            kind: ``"worker"``, the first encoding, or another name in ``residuals.ENCODINGS``.
        """
        if kind == "worker" or self.compressor.shard_compressor == self.compressor:
            return bool(self.feedback)
        return bool(self.feedback) and self.compressor.shard_compressor.traits.needs_feedback

    @property
    def encodes_residuals(self) -> bool:
        """Whether the unit has residuals that may be in 8 bits."""
        return bool(self.feedback) and isinstance(self.compressor, Codec) and self.compressor.encodes_residuals

    def encoder(self, kind: str) -> Compressor:
        """The method of the encoding named ``kind``: the compressor for ``"worker"``, the shards' for others."""
        return self.compressor if kind == "worker" else self.compressor.shard_compressor

    def exactly(self, program: Program = ALLREDUCE) -> UnitPlan:
        """The unit, averaged in place without compression, in a message that its bucket decides."""
        return replace(self, compressor=Identity(), program=program, feedback=False, message=None, channel=None)

    def sent_to_shards(self, span: Span = SHARD) -> UnitPlan:
        """The unit as it is sent where the mean ends in shards and others are compressed: exactly, if it is not
        compressed, and in their program."""
        return (
            replace(self, compressor=Identity(), program=default_program(Identity(), 1, span))
            if self.in_place
            else self
        )

    def decaying(self, decay: float) -> UnitPlan:
        """The unit with ``decay`` as its feedback, if it has feedback."""
        return replace(self, feedback=decay) if self.feedback else self

    def at_step(self, step: int) -> UnitPlan:
        """The same unit with its compressor's configuration at ``step``, counted from the first compressed step."""
        return replace(self, compressor=self.compressor.at_step(step))


def takes_shards(compressor: Compressor) -> bool:
    """Whether a compressor can encode the shards of a parameter one by one, and so be used where the mean ends in
    shards. Momenta and low-rank factors are of whole parameters."""
    return isinstance(compressor, Codec) and compressor.traits.states == 1
