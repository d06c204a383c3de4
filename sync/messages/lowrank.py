"""Messages of low-rank methods, which compute between their collectives (PowerSGD: Vogels et al., NeurIPS 2019).

A message has matrices, whose factors are sent, and units that are sent exactly, in the first collective of a step.
All sums are in fp32. Every stage computes all matrices in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import assert_never

import torch

from gckernels.batch import bind_decodes, bind_encodes
from gckernels.codec import SEED_MASK, Decoding, Encoding
from gckernels.ops import PowerSGD
from gckernels.ops.powersgd import ops as powersgd_ops
from gckernels.toolkit.payload import ALIGN_NBYTES, round_up

from ..communication.communicators import Communicators
from ..programs.stages import MessageKind, StageKind, StageSpec, stages_of
from ..programs.steps import Program
from ..resources.error_probe import Readings
from ..resources.feedback import Feedback
from .buffers import Buffers
from .collectives import issue_all_reduce
from .message import Issue, Message, Unit, Wait, Work, as_work, compressor_names, compressor_of
from .seeds import Seeds

LEFT, RIGHT = SIDES = (0, 1)
_KINDS = ("p", "q")  # the kinds under which the factors of each side are kept


@dataclass(frozen=True)
class _Batch:
    """Matrices that go through the ops together.

    Attributes:
        grads: ``[rows * cols]`` each, where they lie in the bucket.
        residuals: the same numbers of elements; an empty list without error feedback.
        factors: left factors ``[rank, rows]`` and right factors ``[rank, cols]``, in the buffers to send.
        kept_factors: factors of each side with which a step begins; empty lists if every step begins with random ones.
        seeds: seeds of the random factors.
    """

    grads: list[torch.Tensor]
    residuals: list[torch.Tensor]
    factors: tuple[list[torch.Tensor], list[torch.Tensor]]
    kept_factors: tuple[list[torch.Tensor], list[torch.Tensor]]
    seeds: list[int]


@dataclass(frozen=True)
class _BoundBatch:
    """The stages of a batch, bound to its tensors; a tuple has one function for each side.

    Attributes:
        begin: set the factors to orthonormal bases of the kept factors, or of random ones.
        project: compute the factors from the matrices and the factors of the other side.
        finish_left: make the left factors orthonormal.
        keep: keep the factors for the next step.
        reconstruct: compute gradients and residuals from the factors.
    """

    begin: tuple[Callable[[], None], Callable[[], None]]
    project: tuple[Callable[[], None], Callable[[], None]]
    finish_left: Callable[[], None]
    keep: tuple[Callable[[], None], Callable[[], None]]
    reconstruct: Callable[[], None]


class LowRankMessage(Message):
    """Units that are sent as factors, and units that are sent exactly.

    Args:
        program: the program of all units: ``POWERSGD`` sends both factors in every step, ``ENCODED_ALLREDUCE`` left and
            right factors in turn.
        units: units of :class:`~gckernels.PowerSGD`, or of a compressor whose payload is the values in fp32.
        communicators: the process groups of this rank.
        feedback: the residuals and factors.
        seeds: the seeds, with those of the random factors with which matrices begin.
    """

    def __init__(
        self,
        program: Program,
        units: Sequence[Unit],
        communicators: Communicators,
        feedback: Feedback,
        seeds: Seeds,
    ) -> None:
        self.keys, self.compressors = tuple(unit.plan.key for unit in units), compressor_names(units)
        self._communicators = communicators
        self._scale = 1.0 / communicators.world_size  # applied before sending, so that sums are means
        self._feedback = feedback
        self._seeds = seeds
        buffers = Buffers(program, units, communicators)
        specs = stages_of(MessageKind.LOW_RANK, program, buffers.capabilities, communicators.topology)
        self._sends_both = sum(spec.kind == StageKind.COLLECTIVE for spec in specs) > 1
        self.sent_nbytes = sum(buffers.sent_nbytes(spec) for spec in specs)
        exact = [unit for unit in units if not isinstance(unit.plan.compressor, PowerSGD)]
        matrices = [unit for unit in units if isinstance(unit.plan.compressor, PowerSGD)]
        with_feedback = [unit for unit in units if unit.plan.has_residual("worker")]
        self._watched = [(unit.plan.key, unit.grad, self._kept(unit)) for unit in matrices]
        self._readings: Readings | None = None  # if this step is watched
        self._residuals = [(unit.plan.key, self._residual(unit)) for unit in with_feedback]
        self._spared: list[tuple[torch.Tensor, torch.Tensor]] = []  # residuals of unused units, and copies of them
        self._wires, factors, payloads = self._allocate(units[0].grad.device, matrices, exact)
        self._encode = [bind_encodes(map(self._encoding, exact, each), self._scale) for each in payloads]
        self._decode = [bind_decodes(map(_decoding, exact, each)) for each in payloads]
        alike: dict[tuple[bool, bool], list[tuple[Unit, torch.Tensor, torch.Tensor]]] = {}
        for unit, left, right in zip(matrices, *factors, strict=True):
            key = unit.plan.feedback, bool(unit.plan.compressor.factor_sizes(unit.grad.numel()))
            alike.setdefault(key, []).append((unit, left, right))
        self._batches = [_bound(self._batch(group), self._scale, seeds.added()) for group in alike.values()]
        self.stages = [
            buffers.collective(spec, self._bind_collective(spec))
            if spec.kind == StageKind.COLLECTIVE
            else buffers.stage(spec, self._bind(spec))
            for spec in specs
        ]

    def _bind(self, spec: StageSpec) -> Work:
        """The work of a stage."""
        match spec.kind:
            case StageKind.PROJECT if not self._sends_both:
                return self._project_in_turn
            case StageKind.PROJECT:
                return self._project_left if spec.phase == 0 else as_work(self._project_right)
            case StageKind.RECONSTRUCT:
                return self._reconstruct
            case StageKind.ENCODE | StageKind.DECODE | StageKind.RECODE | StageKind.ENCODE_SHARD | StageKind.ADD:
                raise AssertionError(f"no computing of a low-rank message: {spec}")
            case StageKind.AVERAGE | StageKind.COLLECTIVE | StageKind.CUT | StageKind.JOIN | StageKind.COPY:
                raise AssertionError(f"no computing of a low-rank message: {spec}")
            case _:
                assert_never(spec.kind)

    # ---------------------------------------------------------------- buffers

    def _allocate(
        self, device: torch.device, matrices: Sequence[Unit], exact: Sequence[Unit]
    ) -> tuple[list[torch.Tensor], list[list[torch.Tensor]], list[list[torch.Tensor]]]:
        """The buffers to send for each side, ``fp32 [numel]``, and the tensors in them.

        A buffer holds the factors of all matrices, and after them the payloads of units that are sent exactly. If both
        sides are sent in a step, only the left buffer has these payloads.

        Returns:
            For each side the buffer, the factors ``[rank, length]``, and the payloads.
        """
        wires, factors, exact_payloads = [], [], []
        for side in SIDES:
            shapes = [_factor_shape(unit, side) for unit in matrices]
            sizes = [round_up(4 * rank * length, ALIGN_NBYTES) for rank, length in shapes]
            beside = [] if self._sends_both and side == RIGHT else exact
            payloads = [compressor_of(unit).payload_nbytes(unit.grad.numel()) for unit in beside]
            wire = torch.zeros(sum(sizes) + sum(payloads), dtype=torch.uint8, device=device)
            pieces = torch.split(wire, [*sizes, *payloads])
            factors.append(
                [
                    piece.view(torch.float32)[: rank * length].view(rank, length)
                    for piece, (rank, length) in zip(pieces, shapes, strict=False)
                ]
            )
            exact_payloads.append(list(pieces[len(sizes) :]))
            wires.append(wire.view(torch.float32))
        return wires, factors, exact_payloads

    def _batch(self, group: Sequence[tuple[Unit, torch.Tensor, torch.Tensor]]) -> _Batch:
        """A batch of units, each with its factors.

        All or none of the units have a residual, and all or none keep their factors.
        """
        grads = [unit.grad for unit, *_ in group]
        residuals = [self._residual(unit) for unit, *_ in group if unit.plan.feedback]
        kept_factors: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for unit, *factors in group:
            for kind, numel in unit.plan.compressor.factor_sizes(unit.grad.numel()).items():
                side = _KINDS.index(kind)
                kept = self._feedback.residual(kind, unit.plan.key, numel)
                kept_factors[side].append(kept.view_as(factors[side]))
        # modulo 2**63, the range of seeds of the ops
        seeds = [self._seeds.of("factor", unit.plan.key) & SEED_MASK for unit, *_ in group]
        both = [left for _, left, _ in group], [right for _, _, right in group]
        return _Batch(grads, residuals, both, kept_factors, seeds)

    def _encoding(self, unit: Unit, payload: torch.Tensor) -> Encoding:
        return Encoding(compressor_of(unit), unit.grad, self._kept(unit), payload)

    def _kept(self, unit: Unit) -> torch.Tensor | None:
        return self._residual(unit) if unit.plan.has_residual("worker") else None

    def _residual(self, unit: Unit) -> torch.Tensor:
        return self._feedback.residual("worker", unit.plan.key, unit.grad.numel())

    # ---------------------------------------------------------------- stages

    def _bind_collective(self, spec: StageSpec) -> Issue:
        group = self._communicators.link(spec.phase).group

        def issue(step: int) -> Wait:
            wire = self._wires[spec.phase if self._sends_both else _side_in_turn(step)]
            return issue_all_reduce(wire, group) if wire.numel() else _wait_for_nothing

        return issue

    def _project_left(self, step: int) -> None:
        self._begin(RIGHT)
        self._project(LEFT)

    def _project_right(self) -> None:
        for batch in self._batches:
            batch.finish_left()
        self._project(RIGHT)

    def _project_in_turn(self, step: int) -> None:
        side = _side_in_turn(step)
        self._begin(RIGHT if side == LEFT else LEFT)
        self._project(side)

    def _reconstruct(self, step: int) -> None:
        """Compute gradients and residuals from the factors, keep the new factors, decode the exact payloads."""
        new, exact = (RIGHT, LEFT) if self._sends_both else (_side_in_turn(step), _side_in_turn(step))
        for batch in self._batches:
            batch.keep[new]()
            batch.reconstruct()
        self._decode[exact]()
        for residual, copy in self._spared:
            residual.add_(copy)
        self._spared = []
        if self._readings is not None:
            for watched in self._watched:
                self._readings.after(*watched)
            self._readings = None

    def _begin(self, side: int) -> None:
        """Set the factors of a side to orthonormal bases of the kept factors, or of random ones."""
        self._spared = self._feedback.unused.keep(self._residuals)
        for residual, _ in self._spared:
            residual.zero_()
        self._readings = self._feedback.watch.now
        if self._readings is not None:
            for watched in self._watched:
                self._readings.before(*watched)
        for batch in self._batches:
            batch.begin[side]()

    def _project(self, side: int) -> None:
        """Write this rank's part of the mean factors of a side, and of the exact units sent with them."""
        for batch in self._batches:
            batch.project[side]()
        self._encode[side]()


def _bound(batch: _Batch, scale: float, added: torch.Tensor) -> _BoundBatch:
    """The stages of a batch; ``scale`` is applied to the factors that are sent, ``added`` is added to the seeds."""
    (left, right), grads, residuals = batch.factors, batch.grads, batch.residuals
    return _BoundBatch(
        (_bind_begin(batch, LEFT, added), _bind_begin(batch, RIGHT, added)),
        (
            powersgd_ops.bind_left(grads, residuals, right, left, scale),
            powersgd_ops.bind_right(grads, residuals, left, right, scale),
        ),
        powersgd_ops.bind_orthogonalise(left),
        (
            powersgd_ops.bind_keep(left, batch.kept_factors[LEFT]),
            powersgd_ops.bind_keep(right, batch.kept_factors[RIGHT]),
        ),
        powersgd_ops.bind_reconstruct(left, right, grads, residuals),
    )


def _bind_begin(batch: _Batch, side: int, added: torch.Tensor) -> Callable[[], None]:
    factors, kept = batch.factors[side], batch.kept_factors[side]
    make_bases = powersgd_ops.bind_orthogonalise(factors, batch.seeds, added)

    def begin() -> None:
        if kept:
            torch._foreach_copy_(factors, kept)
        else:
            torch._foreach_zero_(factors)  # they become random
        make_bases()

    return begin


def _wait_for_nothing() -> None:
    """Return immediately."""


def _decoding(unit: Unit, payload: torch.Tensor) -> Decoding:
    return Decoding(compressor_of(unit), payload, unit.grad)


def _side_in_turn(step: int) -> int:
    """The side whose factors are sent in this step, in programs that send the sides in turn."""
    return RIGHT if step % 2 else LEFT


def _factor_shape(unit: Unit, side: int) -> tuple[int, int]:
    method = unit.plan.compressor
    assert isinstance(method, PowerSGD)
    return method.rank, method.sides(unit.grad.numel())[side]
