"""Bits per byte of a model that FSDP2 shards over two ranks, with gradients and gathered parameters compressed.

    python -m bench.training.sharded
    python -m bench.training.sharded --seeds 0 --steps 200 --arms "BlockQuant(bits=4), weights BlockQuant"

The byte transformer of ``examples/bytes_lm.py`` is trained with AdamW, once for each arm and seed: with FSDP's own
collectives; and with a compressor attached, another one for the parameters behind ``, weights``, and residuals in 8
bits in arms that end with ``, residuals in 8 bits``. Rows of
``bench/results/cpu/sharded_training.csv`` have bits per byte after all steps, with the same parameters and data in all
arms of a seed, and the bytes that a rank sends in a step. The final table has the mean difference to FSDP's own
collectives.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.lib.program import launch_ranks
from bench.lib.record import csv_path, merge_csv, read_csv
from bench.lib.rounds import CPU, markdown_of_cells
from bench.lib.sharded_tables import EIGHT_BITS, NATIVE, WEIGHTS
from examples import bytes_lm, common
from gckernels import sync

NAME, KEY = "sharded_training", ("arm", "seed", "steps")
ARMS = (
    "Cast16",
    "BlockQuant(bits=4)",
    f"BlockQuant(bits=4){EIGHT_BITS}",
    "BlockQuant(bits=4), weights BlockQuant",
    "BlockQuant(bits=4), weights BlockQuant(bits=4)",
)
RANKS, STEPS, SEEDS = 2, 400, tuple(range(6))


def parse_args() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), metavar="ARM", help="arms beside FSDP's own")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), metavar="SEED")
    parser.add_argument("--steps", type=int, default=STEPS)
    return parser.parse_args()


def train_once(arm: str, seed: int, steps: int) -> dict[str, str | int | float]:
    """Train the model; returns a row; collective."""
    text = bytes_lm.load_text()
    torch.manual_seed(seed)
    model = bytes_lm.ByteTransformer()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        if isinstance(block, bytes_lm.Block):
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    plan, _, weights = arm.removesuffix(EIGHT_BITS).partition(WEIGHTS)
    attachment = None
    if arm != NATIVE:
        residual_bits = 8 if arm.endswith(EIGHT_BITS) else 32
        attachment = sync.attach(model, plan, residual_bits=residual_bits, weights=weights or None)
    torch.manual_seed(1000 + seed)  # all arms draw the same data
    bytes_lm.train(model, text[0], common.StepTimer(CPU), steps=steps)
    stats = {} if attachment is None else attachment.stats()
    if attachment is not None:
        attachment.close()
    _, bits = bytes_lm.evaluate(model, text[1], CPU)
    gathered = stats.get("gathered_nbytes", "")
    row: dict[str, str | int | float] = {"arm": arm, "seed": seed, "steps": steps, "bits_per_byte": f"{bits:.4f}"}
    return row | {"sent_nbytes": stats.get("sent_nbytes", ""), "gathered_nbytes": gathered}


def run_rank(args: argparse.Namespace) -> None:
    common.init_process_group()
    for seed in args.seeds:
        for arm in (NATIVE, *args.arms):
            row = train_once(arm, seed, args.steps)
            if dist.get_rank() == 0:
                merge_csv(NAME, CPU, [row], KEY)
                print(f"seed {seed}, {arm}: {row['bits_per_byte']} bits per byte", flush=True)
    dist.destroy_process_group()


def show(args: argparse.Namespace) -> None:
    """Print the mean differences to FSDP's own collectives."""
    found = {
        (row["arm"], int(row["seed"])): row for row in read_csv(csv_path(NAME, CPU)) if int(row["steps"]) == args.steps
    }
    table = []
    for arm in (NATIVE, *args.arms):
        bits = [float(found[arm, seed]["bits_per_byte"]) for seed in args.seeds]
        own = [float(found[NATIVE, seed]["bits_per_byte"]) for seed in args.seeds]
        differences = [one - other for one, other in zip(bits, own, strict=True)]
        worst = max(differences, key=abs)
        table.append((arm, f"{statistics.fmean(bits):.4f}", f"{statistics.fmean(differences):+.4f}", f"{worst:+.4f}"))
    print(markdown_of_cells(("arm", "bits per byte", "mean difference", "largest"), table))


def main() -> int:
    args = parse_args()
    if "LOCAL_RANK" in os.environ:
        run_rank(args)
        return 0
    status = launch_ranks(RANKS)
    if status == 0:
        show(args)
    return status


if __name__ == "__main__":
    sys.exit(main())
