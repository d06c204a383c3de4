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
import functools
import statistics
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gckernels
from bench.lib.rounds import CPU, markdown_of_cells
from bench.training.arms import Row, measured, parser_of, run
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


def train_once(arm: str, seed: int, steps: int) -> Row:
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


def show(args: argparse.Namespace, arms: Sequence[str]) -> None:
    """Print the mean differences to plain DDP."""
    table = [
        (arm, row["residual_nbytes_per_element"], f"{statistics.fmean(bits):.4f}", f"{statistics.fmean(each):+.4f}")
        for arm, bits, each, row in measured(args, NAME, arms, NATIVE)
    ]
    print(markdown_of_cells(("arm", "residual bytes per element", "bits per byte", "mean difference"), table))


def main() -> int:
    parser = parser_of(__doc__, ARMS, SEEDS, STEPS)
    args = parser.parse_args()
    if unknown := [arm for arm in args.arms if arm not in ARMS]:
        parser.error(f"argument --arms: invalid choice: {unknown[0]!r} (choose from {', '.join(ARMS)})")
    arms = [NATIVE, *args.arms]
    train = functools.partial(train_once, steps=args.steps)
    return run(args, NAME, KEY, arms, RANKS, train, lambda: show(args, arms))


if __name__ == "__main__":
    sys.exit(main())
