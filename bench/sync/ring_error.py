"""What encoding anew in every hop of a ring costs: its error beside those of the two-phase scheme.

    python -m bench.sync.ring_error

Ranks are played one after the other in this process, with the compressors' own encode and decode. Gradients are
independent and normal, with a common part that is as large. Reported is the relative error (Euclidean norm) of the
mean: in the first step, and of the sum over all steps, in which error feedback makes good for earlier ones. Written to
``bench/results/cpu/ring_error.csv``.
"""

from __future__ import annotations

import torch

import gckernels
from bench.lib.record import write_csv
from gckernels.compressor import Compressor, chunk_bounds, chunk_numel
from gckernels.sync.messages.message import step_seed, unit_seed

NUMEL, STEPS = 2**16, 20
WORLD_SIZES = (2, 4, 8, 16)
SPECS = ("Cast16", "BlockQuant", "BlockQuant(bits=4)", "QSGD", "EFSignSGD", "TopK")


class Player:
    """One rank: its compressor, and a residual for each thing that it encodes."""

    def __init__(self, compressor: Compressor, rank: int) -> None:
        self.compressor, self.rank = compressor, rank
        self.residuals: dict[str, torch.Tensor] = {}

    def encode(self, what: str, values: torch.Tensor, size: int, step: int) -> torch.Tensor:
        kept = self.residuals.setdefault(what, torch.zeros_like(values)) if self.compressor.needs_feedback else None
        payload = torch.zeros(self.compressor.payload_nbytes(size), dtype=torch.uint8)
        self.compressor.encode(values, kept, payload, step_seed(unit_seed(what, self.rank), step), size=size)
        return payload


def decoded(compressor: Compressor, payloads: list[torch.Tensor], numel: int, size: int) -> torch.Tensor:
    values = torch.zeros(numel)
    compressor.decode(torch.stack(payloads), values, size=size)
    return values


def ring(players: list[Player], grads: list[torch.Tensor], step: int) -> torch.Tensor:
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


def two_phases(players: list[Player], grads: list[torch.Tensor], step: int) -> torch.Tensor:
    ranks, result = len(players), torch.zeros(NUMEL)
    size = chunk_numel(NUMEL, ranks)
    for shard, owner in enumerate(players):
        start, stop = chunk_bounds(NUMEL, size, shard)
        sent = [player.encode(f"to {shard}", grads[player.rank][start:stop], size, step) for player in players]
        mean = decoded(owner.compressor, sent, stop - start, size) / ranks
        result[start:stop] = decoded(owner.compressor, [owner.encode("mean", mean, size, step)], stop - start, size)
    return result


def errors(scheme, spec: str, ranks: int) -> tuple[float, float]:
    """Of the first step, and of the sum of all."""
    generator = torch.Generator().manual_seed(0)
    players = [Player(gckernels.from_spec(spec), rank) for rank in range(ranks)]
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
