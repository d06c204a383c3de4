"""Messages of low-rank methods, which compute between their collectives (PowerSGD: Vogels et al., NeurIPS 2019).

A message has matrices, whose factors are sent, and units that are sent exactly, in the first collective of a step.
All sums are in fp32. Every stage computes all matrices in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from gckernels.batch import bind_decodes, bind_encodes
from gckernels.codec import SEED_MASK, Decoding, Encoding
from gckernels.ops import PowerSGD
from gckernels.ops.powersgd import ops as powersgd_ops
from gckernels.toolkit.payload import ALIGN_NBYTES, round_up

from ..communication.communicators import Communicators
from ..programs.stages import MessageKind, StageKind, StageSpec, stages_of
from ..programs.steps import AllReduce, Place
from ..resources.error_probe import Readings
from ..resources.feedback import Feedback
from ..resources.memory_spaces import Allocate
from ..resources.stage import Issue, Stage, Wait
from .buffers import Buffers
from .collectives import bind_collective
from .message import Message, Unit, compressor_names, compressor_of
from .seeds import Seeds

LEFT, RIGHT = SIDES = (0, 1)
_KINDS = ("p", "q")  # the kinds under which the factors of each side are kept


class LowRankMessage(Message):
    """Units that are sent as factors, and units that are sent exactly.

    Args:
        units: units of :class:`~gckernels.PowerSGD`, or of a compressor whose payload is the values in fp32. Their
            program ``POWERSGD`` sends both factors in every step, ``ENCODED_ALLREDUCE`` left and right factors in turn.
        communicators: the process groups of this rank.
        feedback: the residuals and factors.
        seeds: the seeds, with those of the random factors with which matrices begin.
        allocate: as for :class:`~.buffers.Buffers`.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        communicators: Communicators,
        feedback: Feedback,
        seeds: Seeds,
        allocate: Allocate | None = None,
    ) -> None:
        self.keys, self.compressors = tuple(unit.plan.key for unit in units), compressor_names(units)
        self._communicators, self._feedback, self._seeds = communicators, feedback, seeds
        scale = 1.0 / communicators.world_size  # applied before sending, so that sums are means
        buffers = Buffers(units, communicators, allocate)
        specs = stages_of(MessageKind.LOW_RANK, buffers.program, buffers.capabilities, communicators.topology)
        self._sends_both = sum(spec.kind == StageKind.COLLECTIVE for spec in specs) > 1
        self.sent_nbytes = sum(buffers.sent_nbytes(spec) for spec in specs)
        exact = [unit for unit in units if not isinstance(unit.plan.compressor, PowerSGD)]
        matrices = [unit for unit in units if isinstance(unit.plan.compressor, PowerSGD)]
        self._watched = [(unit.plan.key, unit.grad, _residual(feedback, unit)) for unit in matrices]
        self._readings: Readings | None = None  # if this step is watched
        residuals = [(unit.plan.key, _residual(feedback, unit)) for unit in units]
        self._residuals = {key: residual for key, residual in residuals if residual is not None}
        self._spared: dict[str, torch.Tensor] = {}  # copies of the residuals of unused units
        self._wires, factors, payloads = self._allocate(buffers.allocate, matrices, exact)
        self._encode = [bind_encodes(map(self._encoding, exact, each), scale) for each in payloads]
        self._decode = [bind_decodes(map(_decoding, exact, each)) for each in payloads]
        alike: dict[tuple[bool, bool], list[tuple[Unit, torch.Tensor, torch.Tensor]]] = {}
        for unit, left, right in zip(matrices, *factors, strict=True):
            key = unit.plan.feedback, bool(unit.plan.compressor.factor_sizes(unit.grad.numel()))
            alike.setdefault(key, []).append((unit, left, right))
        self._batches = [_Batch(group, feedback, seeds, scale) for group in alike.values()]
        self.stages = [self._bind(buffers, spec) for spec in specs]

    def _bind(self, buffers: Buffers, spec: StageSpec) -> Stage:
        """The stage of a spec."""
        match spec.kind:
            case StageKind.COLLECTIVE:
                return buffers.collective(spec, self._bind_collective(spec))
            case StageKind.PROJECT:
                return buffers.stage(spec, partial(self._project, spec.phase))
            case StageKind.RECONSTRUCT:
                return buffers.stage(spec, partial(self._reconstruct, spec.phase - 1))
        raise AssertionError(f"no stage of a low-rank message: {spec}")

    # ---------------------------------------------------------------- buffers

    def _allocate(
        self, allocate: Allocate, matrices: Sequence[Unit], exact: Sequence[Unit]
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
            wire = allocate([sum(sizes) + sum(payloads)], torch.uint8, Place.DEVICE)
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

    def _encoding(self, unit: Unit, payload: torch.Tensor) -> Encoding:
        return Encoding(compressor_of(unit), unit.grad, _residual(self._feedback, unit), payload)

    # ---------------------------------------------------------------- stages

    def _side(self, phase: int) -> int:
        """The side whose factors are sent in this step after ``phase`` other collectives."""
        return phase if self._sends_both else self._seeds.step % 2

    def _bind_collective(self, spec: StageSpec) -> Issue:
        link, calls = self._communicators.link(spec.phase), []
        for wire in self._wires:
            _, call = bind_collective(AllReduce(), wire[None, None], link, 0, False, wire.dtype, wire.new_zeros)
            calls.append(call if wire.numel() else _send_nothing)
        return lambda: calls[self._side(spec.phase)]()

    def _project(self, phase: int) -> None:
        """Write this rank's part of the mean factors of a side, and of the exact units sent with them."""
        side = self._side(phase)
        if phase == 0:
            self._begin(RIGHT if side == LEFT else LEFT)
        else:
            for batch in self._batches:
                batch.finish_left()
        for batch in self._batches:
            batch.project[side]()
        self._encode[side]()

    def _reconstruct(self, last_phase: int) -> None:
        """Compute gradients and residuals from the factors, keep the new factors, decode the exact payloads."""
        for batch in self._batches:
            batch.keep[self._side(last_phase)]()
            batch.reconstruct()
        self._decode[self._side(0)]()
        for key, copy in self._spared.items():
            self._residuals[key].add_(copy)
        self._spared = {}
        if self._readings is not None:
            for watched in self._watched:
                self._readings.after(*watched)
            self._readings = None

    def _begin(self, side: int) -> None:
        """Set the factors of a side to orthonormal bases of the kept factors, or of random ones."""
        self._spared = self._feedback.unused.keep(self._residuals.items())
        for key in self._spared:
            self._residuals[key].zero_()
        self._readings = self._feedback.watch.now
        if self._readings is not None:
            for watched in self._watched:
                self._readings.before(*watched)
        for batch in self._batches:
            batch.begin[side]()


class _Batch:
    """Matrices that go through the ops together: the stages, bound to their tensors.

    Args:
        group: units, each with its left factors ``[rank, rows]`` and its right factors ``[rank, cols]`` in the buffers
            to send. All or none of them have a residual, and all or none keep their factors.
        feedback: the residuals and factors.
        seeds: the seeds of the random factors.
        scale: applied to the factors that are sent.

    Attributes:
        begin: for each side, sets the factors to orthonormal bases of the kept factors, or of random ones.
        project: for each side, computes the factors from the matrices and the factors of the other side.
        finish_left: makes the left factors orthonormal.
        keep: for each side, keeps the factors for the next step.
        reconstruct: computes gradients and residuals from the factors.
    """

    def __init__(
        self,
        group: Sequence[tuple[Unit, torch.Tensor, torch.Tensor]],
        feedback: Feedback,
        seeds: Seeds,
        scale: float,
    ) -> None:
        units, left, right = (list(column) for column in zip(*group, strict=True))
        grads = [unit.grad for unit in units]
        residuals = [each for unit in units if (each := _residual(feedback, unit)) is not None]
        both = left, right
        kept: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for index, unit in enumerate(units):
            for kind, numel in unit.plan.compressor.factor_sizes(unit.grad.numel()).items():
                side = _KINDS.index(kind)
                kept[side].append(feedback.residual(kind, unit.plan.key, numel).tensor.view_as(both[side][index]))
        # modulo 2**63, the range of seeds of the ops
        drawn = [seeds.of("factor", unit.plan.key) & SEED_MASK for unit in units]
        self.begin = [_bind_begin(both[side], kept[side], drawn, seeds.added()) for side in SIDES]
        self.project = (
            powersgd_ops.bind_left(grads, residuals, right, left, scale),
            powersgd_ops.bind_right(grads, residuals, left, right, scale),
        )
        self.finish_left = powersgd_ops.bind_orthogonalise(left)
        self.keep = [powersgd_ops.bind_keep(both[side], kept[side]) for side in SIDES]
        self.reconstruct = powersgd_ops.bind_reconstruct(left, right, grads, residuals)


def _bind_begin(
    factors: list[torch.Tensor], kept: list[torch.Tensor], seeds: list[int], added: torch.Tensor
) -> Callable[[], None]:
    make_bases = powersgd_ops.bind_orthogonalise(factors, seeds, added)

    def begin() -> None:
        if kept:
            torch._foreach_copy_(factors, kept)
        else:
            torch._foreach_zero_(factors)  # they become random
        make_bases()

    return begin


def _send_nothing() -> Wait:
    """Replaces the collective of an empty buffer; there is nothing to wait for."""
    return lambda: None


def _residual(feedback: Feedback, unit: Unit) -> torch.Tensor | None:
    return feedback.residual("worker", unit.plan.key, unit.grad.numel()).tensor if unit.plan.feedback else None


def _decoding(unit: Unit, payload: torch.Tensor) -> Decoding:
    return Decoding(compressor_of(unit), payload, unit.grad)


def _factor_shape(unit: Unit, side: int) -> tuple[int, int]:
    method = unit.plan.compressor
    assert isinstance(method, PowerSGD)
    return method.rank, method.sides(unit.grad.numel())[side]
