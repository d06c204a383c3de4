"""Trainings of several arms and seeds on ranks that a benchmark starts, with a row of a table for each."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence

import torch.distributed as dist

from bench.lib.program import launch_ranks, program_parser
from bench.lib.record import merge_csv
from bench.lib.rounds import CPU
from examples import common

Row = dict[str, str | int | float]


def parser_of(
    doc: str | None, arms: Sequence[str], seeds: Sequence[int], steps: int, hint: str | None = None
) -> argparse.ArgumentParser:
    """The parser of a benchmark, with the arms, seeds and steps that it has by default, and a hint about arms."""
    parser = program_parser(doc)
    parser.add_argument("--arms", nargs="+", default=list(arms), metavar="ARM", help=hint)
    parser.add_argument("--seeds", nargs="+", type=int, default=list(seeds), metavar="SEED")
    parser.add_argument("--steps", type=int, default=steps)
    return parser


def run(
    args: argparse.Namespace,
    name: str,
    key: Sequence[str],
    arms: Sequence[str],
    ranks: int,
    train_once: Callable[[str, int], Row],
    show: Callable[[], None],
    metric: str = "bits_per_byte",
) -> int:
    """The exit status of a benchmark: on a rank of it after all trainings, elsewhere after all ranks.

    Args:
        args: the arguments of its parser.
        name, key: the name and the key of the table that has the rows.
        arms: what is trained with each seed.
        ranks: the number of ranks.
        train_once: trains an arm with a seed, and returns a row; collective.
        show: prints the results at the end.
        metric: the column of the rows that is printed after each training.
    """
    if "LOCAL_RANK" not in os.environ:
        status = launch_ranks(ranks)
        if status == 0:
            show()
        return status
    common.init_process_group()
    for seed in args.seeds:
        for arm in arms:
            row = train_once(arm, seed)
            if dist.get_rank() == 0:
                merge_csv(name, CPU, [row], key)
                print(f"seed {seed}, {arm}: {metric} {row[metric]}", flush=True)
    dist.destroy_process_group()
    return 0
