"""The error of a ring, which encodes again in every hop, beside the error of the two-phase scheme.

    python -m bench.sync.ring_error

This process simulates all ranks, one after the other, with the compressors' own encode and decode. Gradients are
independent and normal, plus a common part of the same size. The results are relative errors (Euclidean norm) of the
mean: in the first step, and of the sum over all steps, in which error feedback compensates for earlier errors. Writes
``bench/results/cpu/ring_error.csv``.
"""

from __future__ import annotations

import torch

import gckernels
from bench.lib.record import write_csv
from gckernels.codec import Codec, chunk_bounds, chunk_numel
from gckernels.sync.messages.seeds import step_seed, unit_seed

NUMEL, STEPS = 2**16, 20
WORLD_SIZES = (2, 4, 8, 16)
SPECS = ("Cast16", "BlockQuant", "BlockQuant(bits=4)", "QSGD", "EFSignSGD", "TopK")


class SimulatedRank:
    """A rank with its compressor and a residual for each name that it encodes under."""

    def __init__(self, compressor: Codec, rank: int) -> None:
        self.compressor, self.rank = compressor, rank
        self.residuals: dict[str, torch.Tensor] = {}

    def encode(self, what: str, values: torch.Tensor, size: int, step: int) -> torch.Tensor:
        """The payload of ``values``; ``what`` names its residual and seed."""
        residual = None
        if self.compressor.traits.needs_feedback:
            residual = self.residuals.setdefault(what, torch.zeros_like(values))
        payload = torch.zeros(self.compressor.payload_nbytes(size), dtype=torch.uint8)
        self.compressor.encode(values, residual, payload, step_seed(unit_seed(what, self.rank), step), size=size)
        return payload


def decoded(compressor: Codec, payloads: list[torch.Tensor], numel: int, size: int) -> torch.Tensor:
    """The sum of the decoded payloads."""
    values = torch.zeros(numel)
    compressor.decode(torch.stack(payloads), values, size=size)
    return values


def ring(players: list[SimulatedRank], grads: list[torch.Tensor], step: int) -> torch.Tensor:
    """The mean of ``grads`` as a ring computes it."""
    ranks, result = len(players), torch.zeros(NUMEL)
    size = chunk_numel(NUMEL, ranks)
    for shard in range(ranks):
        start, stop = chunk_bounds(NUMEL, size, shard)
        total = torch.zeros(stop - start)
        payload = torch.empty(0)
        for hop in range(ranks):
            player = players[(shard + 1 + hop) % ranks]
            total = total + grads[player.rank][start:stop]
            payload = player.encode(f"shard {shard}", total, size, step)
            total = decoded(player.compressor, [payload], stop - start, size)
        result[start:stop] = total / ranks
    return result


def two_phases(players: list[SimulatedRank], grads: list[torch.Tensor], step: int) -> torch.Tensor:
    """The mean of ``grads`` as the two-phase scheme computes it."""
    ranks, result = len(players), torch.zeros(NUMEL)
    size = chunk_numel(NUMEL, ranks)
    for shard, owner in enumerate(players):
        start, stop = chunk_bounds(NUMEL, size, shard)
        sent = [player.encode(f"to {shard}", grads[player.rank][start:stop], size, step) for player in players]
        mean = decoded(owner.compressor, sent, stop - start, size) / ranks
        result[start:stop] = decoded(owner.compressor, [owner.encode("mean", mean, size, step)], stop - start, size)
    return result


def errors(scheme, spec: str, ranks: int) -> tuple[float, float]:
    """Relative errors of the first step's result and of the sum of all steps' results."""
    generator = torch.Generator().manual_seed(0)
    codec = gckernels.from_spec(spec)
    assert isinstance(codec, Codec)
    players = [SimulatedRank(codec, rank) for rank in range(ranks)]
    applied, expected, first = torch.zeros(NUMEL), torch.zeros(NUMEL), 0.0
    for step in range(STEPS):
        common = torch.randn(NUMEL, generator=generator)
        grads = [common + torch.randn(NUMEL, generator=generator) for _ in players]
        applied += scheme(players, grads, step)
        expected += torch.stack(grads).mean(0)
        if step == 0:
            first = _relative(applied, expected)
    return first, _relative(applied, expected)


def _relative(applied: torch.Tensor, expected: torch.Tensor) -> float:
    return ((applied - expected).norm() / expected.norm()).item()


def main() -> None:
    rows = []
    for spec in SPECS:
        for ranks in WORLD_SIZES:
            row: dict[str, object] = {"compressor": spec, "ranks": ranks, "steps": STEPS}
            for name, scheme in (("ring", ring), ("two_phases", two_phases)):
                first, summed = errors(scheme, spec, ranks)
                row |= {f"{name}_first_step": f"{first:.4f}", f"{name}_sum": f"{summed:.4f}"}
            rows.append(row)
            print(row, flush=True)
    write_csv("ring_error", torch.device("cpu"), rows)


if __name__ == "__main__":
    main()
