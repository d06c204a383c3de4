"""Messages of low-rank methods, which compute between their collectives.

A message holds matrices, whose factors are sent, and beside them units that are sent exactly, in the first collective
of a step. Everything is added up in fp32. All matrices go through a stage in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gckernels.batch import bind_decodes, bind_encodes
from gckernels.compressor import Decoding, Encoding
from gckernels.ops import PowerSGD
from gckernels.ops.powersgd import ops as powersgd_ops
from gckernels.toolkit.payload import ALIGN_NBYTES, round_up

from ..programs.named import POWERSGD
from ..programs.sizes import sent_nbytes, sizes_of
from ..programs.steps import Program
from ..resources.communicators import Communicators
from ..resources.feedback import Feedback
from ..resources.lanes import Resource
from .message import Message, Stage, Unit, hold_unused, one_shot, step_seed, unit_seed

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
        topology = communicators.topology
        self._groups = [communicators.group(phase) for phase in range(2 if program == POWERSGD else 1)]
        self._scale = 1.0 / communicators.world_size  # of all that is sent: sums are means
        self._feedback = feedback
        self._seed = seed
        self.keys = tuple(unit.plan.key for unit in units)
        sent = [0.0] * len(program)  # of every step
        for unit in units:
            states = sizes_of(program, unit.grad.numel(), unit.grad.dtype, unit.plan.compressor, topology)
            for index, step in enumerate(program):
                sent[index] += sent_nbytes(step, states[index], states[index + 1], topology)
        self.sent_nbytes = sum(sent)
        exact = [unit for unit in units if not isinstance(unit.plan.compressor, PowerSGD)]
        matrices = [unit for unit in units if isinstance(unit.plan.compressor, PowerSGD)]
        with_feedback = [unit for unit in units if unit.plan.remembers("worker")]
        self._unused = [(unit.grad, self._residual(unit)) for unit in with_feedback] if keep_unused else []
        self._held: list[torch.Tensor] = []
        both = program == POWERSGD
        self._wires, factors, places = self._allocate(units[0].grad.device, matrices, exact, both)
        self._encode = [bind_encodes(map(self._encoding, exact, each), self._scale) for each in places]
        self._decode = [bind_decodes(map(_decoding, exact, each)) for each in places]
        alike: dict[tuple[bool, bool], list[tuple[Unit, torch.Tensor, torch.Tensor]]] = {}
        for unit, left, right in zip(matrices, *factors, strict=True):
            key = unit.plan.feedback, bool(unit.plan.compressor.factor_sizes(unit.grad.numel()))
            alike.setdefault(key, []).append((unit, left, right))
        self._batches = [self._batch(group) for group in alike.values()]
        if program == POWERSGD:
            self.stages = (
                Stage(0, Resource.COMPUTE, self._send_left, "Project(left)"),
                Stage(0, Resource.COMMUNICATE, lambda step: self._add_up(LEFT, 0), "AllReduce", sent[1]),
                Stage(1, Resource.COMPUTE, self._send_right, "Project(right)"),
                Stage(1, Resource.COMMUNICATE, lambda step: self._add_up(RIGHT, 1), "AllReduce", sent[3]),
                Stage(2, Resource.COMPUTE, self._finish_both, "Reconstruct"),
            )
        else:
            self.stages = (
                Stage(0, Resource.COMPUTE, self._send_one, "Project"),
                Stage(0, Resource.COMMUNICATE, lambda step: self._add_up(_turn(step), 0), "AllReduce", sent[1]),
                Stage(1, Resource.COMPUTE, self._finish_one, "Reconstruct"),
            )

    # ---------------------------------------------------------------- buffers

    def _allocate(
        self, device: torch.device, matrices: Sequence[Unit], exact: Sequence[Unit], both: bool
    ) -> tuple[list[torch.Tensor], list[list[torch.Tensor]], list[list[torch.Tensor]]]:
        """For either side the buffer that travels, fp32, and the places in it: the matrices' factors, ``[rank,
        length]``, and payloads of what is sent exactly, behind them; where both sides travel in a step, the left one
        alone has those."""
        wires, factors, places = [], [], []
        for side in SIDES:
            shapes = [_factor_shape(unit, side) for unit in matrices]
            sizes = [round_up(4 * rank * length, ALIGN_NBYTES) for rank, length in shapes]
            beside = [] if both and side == RIGHT else exact
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
        seeds = [step_seed(unit_seed(self._seed, "factor", unit.plan.key), 0) for unit, *_ in group]
        of_sides = [left for _, left, _ in group], [right for _, _, right in group]
        return _Batch(grads, residuals, of_sides, remembered, seeds)

    def _encoding(self, unit: Unit, payload: torch.Tensor) -> Encoding:
        kept = self._residual(unit) if unit.plan.remembers("worker") else None
        return Encoding(one_shot(unit), unit.grad, kept, payload)

    def _residual(self, unit: Unit) -> torch.Tensor:
        return self._feedback.residual("worker", unit.plan.key, unit.grad.numel())

    # ---------------------------------------------------------------- both factors in every step

    def _send_left(self, step: int) -> None:
        self._begin(step, RIGHT)
        self._project(LEFT)

    def _send_right(self, step: int) -> None:
        for batch in self._batches:
            powersgd_ops.orthogonalise(batch.factors[LEFT])
        self._project(RIGHT)

    def _finish_both(self, step: int) -> None:
        self._finish(RIGHT, LEFT)

    # ---------------------------------------------------------------- one factor in turn

    def _send_one(self, step: int) -> None:
        side = _turn(step)
        self._begin(step, RIGHT if side == LEFT else LEFT)
        self._project(side)

    def _finish_one(self, step: int) -> None:
        self._finish(_turn(step), _turn(step))

    # ---------------------------------------------------------------- what they are made of

    def _begin(self, step: int, side: int) -> None:
        """Let the factors of a side be orthonormal bases of what is remembered."""
        self._held = [hold_unused(grad, residual) for grad, residual in self._unused]
        for batch in self._batches:
            if batch.remembered[side]:
                torch._foreach_copy_(batch.factors[side], batch.remembered[side])
            else:  # zeros become random
                torch._foreach_zero_(batch.factors[side])
            powersgd_ops.orthogonalise(batch.factors[side], batch.seeds, step_seed(0, step))

    def _project(self, side: int) -> None:
        """Write the factors of a side, this rank's part of their means, and what travels behind them."""
        for batch in self._batches:
            project = powersgd_ops.left if side == LEFT else powersgd_ops.right
            project(batch.grads, batch.residuals, batch.factors[1 - side], batch.factors[side], self._scale)
        self._encode[side](0)

    def _add_up(self, side: int, phase: int) -> None:
        if self._wires[side].numel():
            dist.all_reduce(self._wires[side], group=self._groups[phase])

    def _finish(self, new: int, exact: int) -> None:
        """Gradients from the factors, residuals from gradients; keep the factors of the side that is ``new``, and take
        what came exactly out of the buffer of the side ``exact``."""
        for batch in self._batches:
            powersgd_ops.keep(batch.factors[new], batch.remembered[new])
            powersgd_ops.reconstruct(*batch.factors, batch.grads, batch.residuals)
        self._decode[exact]()
        for (_, residual), held in zip(self._unused, self._held, strict=True):
            residual.add_(held)


def _decoding(unit: Unit, payload: torch.Tensor) -> Decoding:
    return Decoding(one_shot(unit), payload, unit.grad)


def _turn(step: int) -> int:
    """The side of which the factors are sent in this step, when one of them is."""
    return LEFT if step % 2 == 0 else RIGHT


def _factor_shape(unit: Unit, side: int) -> tuple[int, int]:
    method = unit.plan.compressor
    assert isinstance(method, PowerSGD)
    return method.rank, method.sides(unit.grad.numel())[side]
