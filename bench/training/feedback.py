"""Bits per byte of a model whose residuals are kept in fp32 or in 8 bits, and averaged as in LoCo.

    python -m bench.training.feedback
    python -m bench.training.feedback --seeds 0 1 2 --arms "plain, 8 bits" "LoCo, 8 bits"

The byte transformer of ``examples/bytes_lm.py`` is trained on two ranks with AdamW, once for each arm and seed, with
4 bits per element. Arms that begin with ``attached`` use ``sync.attach``, which encodes gradients and owned shards. The
others encode each rank's gradient alone, in a few lines of torch, where feedback can be any: ``plain`` keeps the error
of the sum of gradient and residual, and ``LoCo`` (Xie et al., arXiv:2407.04480, algorithm 1) keeps the mean of that
error and the old residual, and forgets it every 64 steps. Rows of ``bench/results/cpu/feedback.csv`` have bits per byte
after all steps, with the same parameters and data in all arms of a seed, and the bytes of residuals per element.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gckernels
from bench.lib.program import launch_ranks
from bench.lib.record import csv_path, merge_csv, read_csv
from bench.lib.rounds import CPU, markdown_of_cells
from examples import bytes_lm, common
from gckernels import BlockQuant, sync

NAME, KEY = "feedback", ("arm", "seed", "steps")
NATIVE, ATTACHED, PLAIN, LOCO = "native", "attached", "plain", "LoCo"
ARMS = tuple(f"{rule}, {bits} bits" for rule in (ATTACHED, PLAIN, LOCO) for bits in (32, 8))
COMPRESSOR = BlockQuant(bits=4)
RANKS, STEPS, SEEDS = 2, 400, tuple(range(6))
LOCO_SHARE, LOCO_RESET_STEPS = 0.5, 64


class Feedback:
    """Averages encoded gradients before each step of an optimizer.

    Args:
        parameters: the parameters. Vectors are averaged exactly.
        rule: :data:`PLAIN` or :data:`LOCO`.
        bits: 8 if residuals are rounded to 8 bits, otherwise 32.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], rule: str, bits: int) -> None:
        self._parameters, self._rule, self._bits, self._steps = [*parameters], rule, bits, 0
        self._residuals = [torch.zeros(each.numel(), dtype=torch.float32, device=CPU) for each in self._parameters]

    def average(self, *_: Any) -> None:
        self._steps += 1
        for parameter, residual in zip(self._parameters, self._residuals, strict=True):
            assert parameter.grad is not None
            if parameter.dim() >= 2:
                gradient = parameter.grad.view(-1)
                values = gradient + residual
                gradient.copy_(gckernels.decode(COMPRESSOR, gckernels.encode(COMPRESSOR, values), values.shape))
                self._keep(residual, values - gradient)
            dist.all_reduce(parameter.grad.div_(dist.get_world_size()))

    def _keep(self, residual: torch.Tensor, error: torch.Tensor) -> None:
        if self._rule == LOCO:
            error = torch.lerp(error, residual, LOCO_SHARE)
            if self._steps % LOCO_RESET_STEPS == 0:
                error.zero_()
        if self._bits == 8:
            error = gckernels.decode_residual(gckernels.encode_residual(error), error.numel())
        residual.copy_(error)


def parse_args() -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter  # keeps the line breaks
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=ARMS, metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), metavar="SEED")
    parser.add_argument("--steps", type=int, default=STEPS)
    return parser.parse_args()


def train_once(arm: str, seed: int, steps: int) -> dict[str, str | int | float]:
    """Train the model; returns a row; collective."""
    text = bytes_lm.load_text()
    torch.manual_seed(seed)
    module = bytes_lm.ByteTransformer()
    rule, _, bits = arm.removesuffix(" bits").partition(", ")
    make_optimizer: Any = bytes_lm.make_adamw
    model: nn.Module = module
    if rule in (NATIVE, ATTACHED):
        model = DistributedDataParallel(module)
    handle = sync.attach(model, COMPRESSOR, residual_bits=int(bits)) if rule == ATTACHED else None
    if rule in (PLAIN, LOCO):
        feedback = Feedback(module.parameters(), rule, int(bits))

        def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = bytes_lm.make_adamw(parameters)
            optimizer.register_step_pre_hook(feedback.average)
            return optimizer

    torch.manual_seed(1000 + seed)  # all arms draw the same data
    bytes_lm.train(model, text[0], common.StepTimer(CPU), steps=steps, make_optimizer=make_optimizer)
    kept: float | str = ""
    if handle is not None:
        kept = round(handle.residual_nbytes() / sum(each.numel() for each in module.parameters()), 3)
        handle.close()
    _, bits_per_byte = bytes_lm.evaluate(module, text[1], CPU)
    return {
        "arm": arm,
        "seed": seed,
        "steps": steps,
        "bits_per_byte": f"{bits_per_byte:.4f}",
        "residual_nbytes_per_element": kept,
    }


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
    """Print the mean differences to plain DDP."""
    found = {
        (row["arm"], int(row["seed"])): row for row in read_csv(csv_path(NAME, CPU)) if int(row["steps"]) == args.steps
    }
    table = []
    for arm in (NATIVE, *args.arms):
        bits = [float(found[arm, seed]["bits_per_byte"]) for seed in args.seeds]
        own = [float(found[NATIVE, seed]["bits_per_byte"]) for seed in args.seeds]
        differences = [one - other for one, other in zip(bits, own, strict=True)]
        kept = found[arm, args.seeds[0]]["residual_nbytes_per_element"]
        table.append((arm, kept, f"{statistics.fmean(bits):.4f}", f"{statistics.fmean(differences):+.4f}"))
    print(markdown_of_cells(("arm", "residual bytes per element", "bits per byte", "mean difference"), table))


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
