"""Bits per byte of a model that FSDP2 shards over two ranks, with gradients and gathered parameters compressed.

    python -m bench.training.sharded
    python -m bench.training.sharded --seeds 0 --steps 200 --arms "BlockQuant(bits=4), weights BlockQuant"

The byte transformer of ``examples/bytes_lm.py`` is trained with AdamW, once for each arm and seed: with FSDP's own
collectives; and with a compressor attached, another one for the parameters behind ``, weights``, and residuals in 8
bits in arms that end with ``, residuals in 8 bits``. Rows of
``bench/results/cpu/sharded_training.csv`` have bits per byte after all steps, with the same parameters and data in all
arms of a seed, and the bytes that a rank sends in a step. The final table has the differences to FSDP's own
collectives.
"""

from __future__ import annotations

import functools
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.lib.rounds import CPU
from bench.lib.sharded_tables import EIGHT_BITS, NATIVE, STEPS, WEIGHTS, accuracy_table
from bench.training.arms import Row, parser_of, run
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
RANKS, SEEDS = 2, tuple(range(6))


def train_once(arm: str, seed: int, steps: int) -> Row:
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
    row: Row = {"arm": arm, "seed": seed, "steps": steps, "bits_per_byte": f"{bits:.4f}"}
    return row | {"sent_nbytes": stats.get("sent_nbytes", ""), "gathered_nbytes": gathered}


def main() -> int:
    args = parser_of(__doc__, ARMS, SEEDS, STEPS, "arms beside FSDP's own").parse_args()
    arms = [NATIVE, *args.arms]
    train = functools.partial(train_once, steps=args.steps)
    return run(args, NAME, KEY, arms, RANKS, train, lambda: print(accuracy_table(args.steps)))


if __name__ == "__main__":
    sys.exit(main())
