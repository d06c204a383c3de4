"""Messages of low-rank methods, which compute between their collectives.

A message holds matrices, whose factors are sent, and beside them units that are sent exactly, in the first collective
of a step. Everything is added up in fp32. All matrices go through a stage in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
import torch.distributed as dist

from gckernels.batch import SEED_MASK, bind_decodes, bind_encodes
from gckernels.compressor import Decoding, Encoding
from gckernels.ops import PowerSGD
from gckernels.ops.powersgd import ops as powersgd_ops
from gckernels.toolkit.payload import ALIGN_NBYTES, round_up

from ..programs.stages import MessageKind, StageKind, StageSpec, stages_of
from ..programs.steps import Program
from ..resources.communicators import Communicators
from ..resources.feedback import Feedback
from .buffers import Buffers
from .codings import hold_unused
from .message import Message, Unit, Work, is_odd_step, names_of, one_shot, regardless, unit_seed

LEFT, RIGHT = SIDES = (0, 1)
_KINDS = ("p", "q")  # what the factors of either side are remembered as


@dataclass(frozen=True)
class _Batch:
    """Matrices that go through the ops together.

    Attributes:
        grads: ``[rows * cols]``, where they lie in the bucket.
        residuals: of as many elements; none at all without error feedback.
        factors: of either side, ``[rank, rows]`` and ``[rank, cols]``, where they lie in the buffers that travel.
        remembered: of either side, what a step begins with; none at all where every step begins anew.
        seeds: of those random numbers.
    """

    grads: list[torch.Tensor]
    residuals: list[torch.Tensor]
    factors: tuple[list[torch.Tensor], list[torch.Tensor]]
    remembered: tuple[list[torch.Tensor], list[torch.Tensor]]
    seeds: list[int]


class LowRankMessage(Message):
    """Units that are sent as factors, and such that are sent as they are.

    Args:
        program: of all units: ``POWERSGD``, both factors in every step, or ``ENCODED_ALLREDUCE``, one of them in turn.
        units: of :class:`~gckernels.PowerSGD`, or of a codec whose payload is the values in fp32.
        communicators: one process group for every collective of the program.
        feedback: where residuals and factors are kept.
        seed: of the random numbers that factors begin with.
        keep_unused: a unit whose gradient is all zero on this rank takes nothing out of its residual (see
            :class:`~.engine.EncodedMessage`).
    """

    def __init__(
        self,
        program: Program,
        units: Sequence[Unit],
        communicators: Communicators,
        feedback: Feedback,
        seed: int,
        keep_unused: bool,
    ) -> None:
        self.keys, self.compressors = tuple(unit.plan.key for unit in units), names_of(units)
        self._communicators = communicators
        self._scale = 1.0 / communicators.world_size  # of all that is sent: sums are means
        self._feedback = feedback
        self._seed = seed
        buffers = Buffers(program, units, communicators)
        specs = stages_of(MessageKind.LOW_RANK, program, buffers.capabilities, communicators.topology)
        self._sends_both = sum(spec.kind == StageKind.COLLECTIVE for spec in specs) > 1
        self.sent_nbytes = sum(buffers.sent_nbytes(spec) for spec in specs)
        exact = [unit for unit in units if not isinstance(unit.plan.compressor, PowerSGD)]
        matrices = [unit for unit in units if isinstance(unit.plan.compressor, PowerSGD)]
        with_feedback = [unit for unit in units if unit.plan.has_residual("worker")]
        self._unused = [(unit.grad, self._residual(unit)) for unit in with_feedback] if keep_unused else []
        self._held: list[torch.Tensor] = []
        self._wires, factors, payloads = self._allocate(units[0].grad.device, matrices, exact)
        self._encode = [bind_encodes(map(self._encoding, exact, each), self._scale) for each in payloads]
        self._decode = [bind_decodes(map(_decoding, exact, each)) for each in payloads]
        alike: dict[tuple[bool, bool], list[tuple[Unit, torch.Tensor, torch.Tensor]]] = {}
        for unit, left, right in zip(matrices, *factors, strict=True):
            key = unit.plan.feedback, bool(unit.plan.compressor.factor_sizes(unit.grad.numel()))
            alike.setdefault(key, []).append((unit, left, right))
        self._batches = [self._batch(group) for group in alike.values()]
        self.stages = [buffers.stage(spec, self._bind(spec)) for spec in specs]

    def _bind(self, spec: StageSpec) -> Work:
        """The work of a stage."""
        match spec.kind:
            case StageKind.PROJECT if not self._sends_both:
                return self._project_in_turn
            case StageKind.PROJECT:
                return self._project_left if spec.phase == 0 else regardless(self._project_right)
            case StageKind.COLLECTIVE:
                return self._bind_collective(spec)
            case StageKind.RECONSTRUCT:
                return self._reconstruct
            case StageKind.ENCODE | StageKind.DECODE | StageKind.RECODE | StageKind.ENCODE_SHARD | StageKind.ADD:
                raise AssertionError(f"no stage of a low-rank message: {spec}")
            case StageKind.AVERAGE | StageKind.CUT | StageKind.JOIN | StageKind.COPY:
                raise AssertionError(f"no stage of a low-rank message: {spec}")
            case _:
                assert_never(spec.kind)

    # ---------------------------------------------------------------- buffers

    def _allocate(
        self, device: torch.device, matrices: Sequence[Unit], exact: Sequence[Unit]
    ) -> tuple[list[torch.Tensor], list[list[torch.Tensor]], list[list[torch.Tensor]]]:
        """For either side the buffer that travels, fp32, and the places in it: the matrices' factors, ``[rank,
        length]``, and payloads of what is sent exactly, behind them; where both sides travel in a step, the left one
        alone has those."""
        wires, factors, places = [], [], []
        for side in SIDES:
            shapes = [_factor_shape(unit, side) for unit in matrices]
            sizes = [round_up(4 * rank * length, ALIGN_NBYTES) for rank, length in shapes]
            beside = [] if self._sends_both and side == RIGHT else exact
            payloads = [one_shot(unit).payload_nbytes(unit.grad.numel()) for unit in beside]
            wire = torch.zeros(sum(sizes) + sum(payloads), dtype=torch.uint8, device=device)
            pieces = torch.split(wire, [*sizes, *payloads])
            factors.append(
                [
                    piece.view(torch.float32)[: rank * length].view(rank, length)
                    for piece, (rank, length) in zip(pieces, shapes, strict=False)
                ]
            )
            places.append(list(pieces[len(sizes) :]))
            wires.append(wire.view(torch.float32))
        return wires, factors, places

    def _batch(self, group: Sequence[tuple[Unit, torch.Tensor, torch.Tensor]]) -> _Batch:
        """Of units with their factors; all or none with a residual, all or none with factors to remember."""
        grads = [unit.grad for unit, *_ in group]
        residuals = [self._residual(unit) for unit, *_ in group if unit.plan.feedback]
        remembered: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        for unit, *factors in group:
            for kind, numel in unit.plan.compressor.factor_sizes(unit.grad.numel()).items():
                side = _KINDS.index(kind)
                kept = self._feedback.residual(kind, unit.plan.key, numel)
                remembered[side].append(kept.view_as(factors[side]))
        # modulo 2**63, which is what an op takes
        seeds = [unit_seed(self._seed, "factor", unit.plan.key) & SEED_MASK for unit, *_ in group]
        of_sides = [left for _, left, _ in group], [right for _, _, right in group]
        return _Batch(grads, residuals, of_sides, remembered, seeds)

    def _encoding(self, unit: Unit, payload: torch.Tensor) -> Encoding:
        kept = self._residual(unit) if unit.plan.has_residual("worker") else None
        return Encoding(one_shot(unit), unit.grad, kept, payload)

    def _residual(self, unit: Unit) -> torch.Tensor:
        return self._feedback.residual("worker", unit.plan.key, unit.grad.numel())

    # ---------------------------------------------------------------- stages

    def _bind_collective(self, spec: StageSpec) -> Work:
        group = self._communicators.group(spec.phase)

        def work(offset: int) -> None:
            wire = self._wires[spec.phase if self._sends_both else _turn(offset)]
            if wire.numel():
                dist.all_reduce(wire, group=group)

        return work

    def _project_left(self, offset: int) -> None:
        self._begin(offset, RIGHT)
        self._project(LEFT)

    def _project_right(self) -> None:
        for batch in self._batches:
            powersgd_ops.orthogonalise(batch.factors[LEFT])
        self._project(RIGHT)

    def _project_in_turn(self, offset: int) -> None:
        side = _turn(offset)
        self._begin(offset, RIGHT if side == LEFT else LEFT)
        self._project(side)

    def _reconstruct(self, offset: int) -> None:
        """Gradients from the factors, residuals from gradients. Keep the factors of the side that is new, and take
        what came exactly out of the buffer that it came in."""
        new, exact = (RIGHT, LEFT) if self._sends_both else (_turn(offset), _turn(offset))
        for batch in self._batches:
            powersgd_ops.keep(batch.factors[new], batch.remembered[new])
            powersgd_ops.reconstruct(*batch.factors, batch.grads, batch.residuals)
        self._decode[exact]()
        for (_, residual), held in zip(self._unused, self._held, strict=True):
            residual.add_(held)

    def _begin(self, offset: int, side: int) -> None:
        """Let the factors of a side be orthonormal bases of what is remembered."""
        self._held = [hold_unused(grad, residual) for grad, residual in self._unused]
        for batch in self._batches:
            if batch.remembered[side]:
                torch._foreach_copy_(batch.factors[side], batch.remembered[side])
            else:  # zeros become random
                torch._foreach_zero_(batch.factors[side])
            powersgd_ops.orthogonalise(batch.factors[side], batch.seeds, offset)

    def _project(self, side: int) -> None:
        """Write the factors of a side, this rank's part of their means, and what travels behind them."""
        for batch in self._batches:
            project = powersgd_ops.left if side == LEFT else powersgd_ops.right
            project(batch.grads, batch.residuals, batch.factors[1 - side], batch.factors[side], self._scale)
        self._encode[side](0)


def _decoding(unit: Unit, payload: torch.Tensor) -> Decoding:
    return Decoding(one_shot(unit), payload, unit.grad)


def _turn(offset: int) -> int:
    """The side of which the factors are sent in this step, when one of them is."""
    return RIGHT if is_odd_step(offset) else LEFT


def _factor_shape(unit: Unit, side: int) -> tuple[int, int]:
    method = unit.plan.compressor
    assert isinstance(method, PowerSGD)
    return method.rank, method.sides(unit.grad.numel())[side]
