"""Bits per byte of a model whose updates are averaged over two ranks, in place of gradients.

    python -m bench.training.updates
    python -m bench.training.updates --seeds 0 --peak-lr 6e-3 --arms "EFSignSGD, every 2, decay 1"

The byte transformer of ``examples/bytes_lm.py`` is trained with AdamW, once for each arm and seed: in plain DDP; with a
compressor attached to DDP, so that gradients are compressed before AdamW divides them by their root mean squares; and
with the updates of rounds compressed, where the arm says how many steps a round has (``every``), and what residuals
are multiplied by (``decay``). Rows of ``bench/results/cpu/updates.csv`` have bits per byte after all steps, with the
same parameters and data in all arms of a seed, and the bits that a rank sends per element and step. The final table
has the mean difference to plain DDP.
"""

from __future__ import annotations

import argparse
import functools
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.lib.rounds import CPU
from bench.lib.updates_tables import EVERY, PLAIN, accuracy_table
from bench.training.arms import Row, parser_of, run
from examples import bytes_lm, common
from gckernels import sync

NAME, KEY = "updates", ("arm", "seed", "steps", "peak_lr", "beta2", "ranks")
SIGNS = "EFSignSGD(block=1024, magnitude='projection')"
ARMS = (
    PLAIN,
    "EFSignSGD",
    *(f"{SIGNS}, every {every}, decay 0.5" for every in (1, 2, 4)),
    f"{SIGNS}, every 2, decay 1",
    "EFSignSGD(block=1024), every 2, decay 0.5",
    f"{SIGNS}, every 4, decay 1",
    "BlockQuant(bits=4), every 4, decay 0.5",
    *(f"Identity, every {every}, decay 1" for every in (1, 2, 4)),
)
RANKS, STEPS, SEEDS, BETA2 = 2, 400, (0, 1, 2), 0.95


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__, ARMS, SEEDS, STEPS, f"{PLAIN} is plain DDP")
    parser.add_argument("--peak-lr", type=float, default=bytes_lm.PEAK_LR)
    parser.add_argument("--beta2", type=float, default=BETA2, help="decay of AdamW's second moment")
    parser.add_argument("--ranks", type=int, default=RANKS)
    return parser.parse_args()


def train_once(arm: str, seed: int, steps: int, peak_lr: float, beta2: float) -> Row:
    """Train the model; returns a row; collective."""
    text = bytes_lm.load_text()
    torch.manual_seed(seed)
    module = bytes_lm.ByteTransformer()
    spec, of_updates, rest = arm.partition(EVERY)
    model: torch.nn.Module = module if of_updates else DistributedDataParallel(module)
    attachments = [] if of_updates or arm == PLAIN else [sync.attach(model, spec)]

    def make_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = bytes_lm.make_adamw(parameters)
        optimizer.param_groups[0]["betas"] = (0.9, beta2)
        if of_updates:
            every, decay = rest.split(", decay ")
            updates = sync.average_updates(model, optimizer, spec, every=int(every), decay=float(decay))
            attachments.append(updates)
        return optimizer

    torch.manual_seed(1000 + seed)  # all arms draw the same data
    timer = common.StepTimer(CPU)
    bytes_lm.train(model, text[0], timer, steps=steps, peak_lr=peak_lr, make_optimizer=make_optimizer)
    numel = sum(each.numel() for each in module.parameters())
    nbytes = attachments[0].sent_nbytes_per_step() if attachments else 4 * numel
    for attachment in attachments:
        attachment.close()
    bits = 8 * nbytes / numel / (int(rest.split(",")[0]) if of_updates else 1)
    _, bits_per_byte = bytes_lm.evaluate(module, text[1], CPU)
    row: Row = {"arm": arm, "seed": seed, "steps": steps, "peak_lr": peak_lr, "beta2": beta2}
    return row | {"ranks": dist.get_world_size(), "bits_per_byte": f"{bits_per_byte:.4f}", "sent_bits": f"{bits:.3f}"}


def main() -> int:
    args = parse_args()
    train = functools.partial(train_once, steps=args.steps, peak_lr=args.peak_lr, beta2=args.beta2)
    table = functools.partial(accuracy_table, args.steps, args.peak_lr, args.beta2, args.ranks)
    return run(args, NAME, KEY, args.arms, args.ranks, train, lambda: print(table()))


if __name__ == "__main__":
    sys.exit(main())
