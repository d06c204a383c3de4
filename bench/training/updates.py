"""The loss of a network whose updates are averaged over two ranks, in place of gradients.

    python -m bench.training.updates
    python -m bench.training.updates --seeds 0 --peak-lr 6e-3 --arms "EFSignSGD, every 2, decay 1"
    python -m bench.training.updates --network fashion_mnist --optimizer sgd --peak-lr 0.1
    python -m bench.training.updates --network bytes_gru --optimizer muon --arms none "EFSignSGD, every 2, decay 0.8"

A network of ``networks.py`` is trained, once for each arm and seed: in plain DDP; with a compressor attached to DDP, so
that gradients are compressed before the optimizer makes steps of them, or with ``direction`` Adam's directions; and
with the updates of rounds compressed, where the arm says how many steps a round has (``every``). Rounds that are
``growing`` have more when the learning rate falls, and ``growing both ways`` before its highest value, too. ``short
steps`` have no factors (``scale_steps=False``). Residuals are multiplied by ``decay``, if the arm has it. Rows of
``bench/results/cpu/updates.csv`` have the cross-entropy on the test set in bits (per byte or image) after all steps and
the share of correct predictions, with the same parameters and data in all arms of a seed, and the bits that a rank
sends per element and step. With ``--curve-every`` they have the loss between steps, too, as ``steps:loss``. The final
table has the mean difference to plain DDP.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.lib.updates_tables import PLAIN, SIGNS, accuracy_table, parts_of
from bench.training.arms import Row, parser_of, run
from bench.training.muon import MuonAndAdamW, hidden_matrices
from bench.training.networks import NETWORKS, Curve, average_parameters
from examples import bytes_lm, digits
from gckernels import sync

NAME = "updates"
KEY = ("network", "optimizer", "arm", "seed", "steps", "peak_lr", "beta2", "ranks")
OPTIMIZERS = ("adamw", "sgd", "muon")
ARMS = (
    PLAIN,
    "EFSignSGD",
    *(f"{SIGNS}, decay {decay}" for decay in (0.5, 0.25)),
    *(f"{SIGNS}, every {every}, decay 0.8" for every in (1, 2)),
    *(f"{SIGNS}, every 2, decay {decay}" for decay in (0.5, 1)),
    "EFSignSGD(block=1024), every 2, decay 0.8",
    f"{SIGNS}, direction, decay 0.8",
    f"{SIGNS}, every 2 growing, decay 0.8",
    f"{SIGNS}, every 2 growing both ways, decay 0.8",
    *(f"{SIGNS}, every 4{steps}, decay 1" for steps in ("", ", short steps")),
    *(f"BlockQuant(bits=4), every {every}, decay 1" for every in (4, 10, 30)),
    *(f"Identity, every {every}{steps}, decay 1" for every in (1, 2, 4) for steps in ("", ", short steps")),
)
RANKS, SEEDS, BETA2 = 2, (0, 1, 2), 0.95


def parse_args() -> argparse.Namespace:
    parser = parser_of(__doc__, ARMS, SEEDS, 0, f"{PLAIN} is plain DDP")
    parser.add_argument("--network", choices=list(NETWORKS), default="bytes_lm")
    parser.add_argument("--optimizer", choices=OPTIMIZERS, default="adamw")
    parser.add_argument("--peak-lr", type=float, default=bytes_lm.PEAK_LR)
    parser.add_argument("--beta2", type=float, default=BETA2, help="decay of AdamW's second moment, also beside Muon")
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--curve-every", type=int, default=0, help="steps between evaluations; 0 for none")
    args = parser.parse_args()
    args.steps = args.steps or NETWORKS[args.network].steps
    return args


def optimizer_of(
    kind: str, parameters: Iterable[torch.nn.Parameter], network: torch.nn.Module, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """An optimizer of the parameters of a network, one of :data:`OPTIMIZERS`. Schedules set its learning rate."""
    if kind == "muon":
        return MuonAndAdamW(parameters, hidden_matrices(network), betas)
    if kind == "sgd":
        return digits.make_sgd(parameters)
    return torch.optim.AdamW(parameters, betas=betas, weight_decay=0.01)


def train_once(arm: str, seed: int, args: argparse.Namespace) -> Row:
    """Train the network; returns a row; collective."""
    network = NETWORKS[args.network]
    torch.manual_seed(seed)
    module = network.build()
    parts = parts_of(arm)
    spec, every, decay = parts.spec, parts.every, parts.setting
    model: torch.nn.Module = module if every else DistributedDataParallel(module)
    attachments = []
    if not every and arm != PLAIN:
        plan = sync.uniform_plan(model, spec)
        attachments.append(sync.attach(model, plan.with_units(unit.decaying(float(decay or 1)) for unit in plan.units)))

    def make_optimizer(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        if parts.is_direction:
            optimizer: torch.optim.Optimizer = torch.optim.SGD(parameters, lr=args.peak_lr, weight_decay=0.01)
            sync.AdamDirection(module, optimizer, (0.9, args.beta2))
            return optimizer
        optimizer = optimizer_of(args.optimizer, parameters, module, (0.9, args.beta2))
        if every:
            updates = sync.Updates(
                optimizer,
                spec,
                every=parts.rounds(network.rates(args.steps)),
                decay=float(decay),
                scale_steps=False if parts.is_short else None,
            )
            attachments.append(sync.attach(model, updates))
        return optimizer

    torch.manual_seed(1000 + seed)  # all arms draw the same data
    curve = Curve(network, module, args.curve_every)
    network.train(model, args.steps, args.peak_lr, make_optimizer, curve)
    numel = sum(each.numel() for each in module.parameters())
    bits = 32.0
    for attachment in attachments:
        rounds_made = attachment.steps / args.steps if every else 1
        bits = 8 * attachment.sent_nbytes_per_step() * rounds_made / numel
        attachment.close()
    average_parameters(module)
    correct, loss = network.evaluate(module)
    row: Row = {"network": args.network, "optimizer": args.optimizer, "arm": arm, "seed": seed, "steps": args.steps}
    row |= {"peak_lr": args.peak_lr, "beta2": args.beta2, "ranks": dist.get_world_size()}
    row |= {"bits": f"{loss:.4f}", "correct": f"{correct:.4f}", "sent_bits": f"{bits:.3f}"}
    return row | {"curve": str(curve)}


def main() -> int:
    args = parse_args()
    train = functools.partial(train_once, args=args)
    settings = args.steps, args.peak_lr, args.beta2, args.ranks, args.network, args.optimizer
    return run(args, NAME, KEY, args.arms, args.ranks, train, lambda: print(accuracy_table(*settings)), "bits")


if __name__ == "__main__":
    sys.exit(main())
