"""Training with every compressor at its default setting, against plain DDP: accuracy, bytes sent, seconds per step.

    python -m bench.training.convergence
    python -m bench.training.convergence --models digits --compressors EFSignSGD "BlockQuant(bits=4)" --seeds 0

Two ranks train each model of ``recipes.py`` with each compressor, over Gloo on loopback, or over NCCL if every rank has
a GPU. Every run writes a row of ``bench/results/<device>/convergence.csv`` when it ends, in place of the row of the
same model, compressor and seed: runs can be repeated, and an interrupted command keeps the rows of finished runs.
``convergence.png`` is drawn from that file.

A final table compares the runs with plain DDP at the same seeds, whose rows may come from an earlier command. The exit
status is 1 if a compressor is worse by more than its margin or a rank has failed, 2 if a compressor could not be
compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import gckernels
from bench.lib.program import launch_ranks, program_parser
from bench.lib.record import csv_path, merge_csv, read_csv
from bench.lib.rounds import markdown_of_cells
from bench.training import fashion_mnist
from bench.training.margins import MARGIN_EXCEPTIONS, margin_of, worse_by
from bench.training.recipes import MODELS, PLAIN, RECIPES, SEEDS, SHORT, train_once
from examples import common

NAME = "convergence"
KEY = ("model", "compressor", "seed")
RANKS = 2


def parse_args() -> argparse.Namespace:
    parser = program_parser(__doc__)
    known = [PLAIN, *sorted(gckernels.COMPRESSORS)]
    parser.add_argument("--models", nargs="+", default=list(SHORT), choices=list(MODELS), metavar="MODEL")
    parser.add_argument("--compressors", nargs="+", default=known, metavar="SPEC", help='"none" is plain DDP')
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS), metavar="SEED")
    args = parser.parse_args()
    for spec in args.compressors:
        if spec != PLAIN:
            try:
                gckernels.from_spec(spec)
            except ValueError as error:
                parser.error(str(error))
    wanted = [model for model in args.models if model.startswith("fashion_mnist")]
    if wanted and not fashion_mnist.is_installed():
        args.models = [model for model in args.models if model not in wanted]
        if not in_rank():
            package, left_out = fashion_mnist.PACKAGE, " and ".join(wanted)
            print(f"NOTE: {left_out} left out: the data needs Debian's package {package} (apt-get install {package})\n")
    return args


# -------------------------------------------------------------------- in each rank


def in_rank() -> bool:
    return "LOCAL_RANK" in os.environ


def run_rank(args: argparse.Namespace) -> None:
    device = common.init_process_group()
    for model in args.models:
        # compressors take turns, so that drifts of the machine's speed affect all of them
        for seed in args.seeds:
            for spec in args.compressors:
                start = time.perf_counter()
                result = train_once(model, spec, seed, device)
                if dist.get_rank() == 0:
                    row = {"model": model, "compressor": spec, "seed": seed, "world_size": dist.get_world_size()}
                    row |= {name: _cell(name, value) for name, value in dataclasses.asdict(result).items()}
                    merge_csv(NAME, device, [row], KEY)
                    cost = f"{row['sent_nbytes_per_step']} bytes/step, {1e3 * result.mean_step_s:.1f} ms/step"
                    metric = f"{MODELS[model].metric} {row[MODELS[model].metric]}"
                    elapsed = f"{time.perf_counter() - start:.1f} s in all"
                    print(f"{model}, {spec}, seed {seed}: {metric}, {cost}, {elapsed}", flush=True)
    dist.destroy_process_group()


def _cell(column: str, value: float | None) -> str:
    if value is None:
        return ""
    formats = {"accuracy": ".5f", "bits_per_byte": ".4f", "sent_nbytes_per_step": ".0f", "mean_step_s": ".5f"}
    return format(value, formats.get(column, ""))


# -------------------------------------------------------------------- before and after


def means(rows: list[dict[str, str]], model: str, spec: str, seeds: list[int]) -> dict[str, float] | None:
    """Means of the compared columns over the seeds, by column; ``None`` if a seed is missing."""
    columns = (MODELS[model].metric, "sent_nbytes_per_step", "mean_step_s", "steps")
    wanted = {(model, spec, str(seed)) for seed in seeds}
    runs = [row for row in rows if tuple(row[column] for column in KEY) in wanted]
    if len(runs) < len(wanted):
        return None
    return {column: statistics.fmean(float(row[column]) for row in runs) for column in columns}


def judge(rows: list[dict[str, str]], args: argparse.Namespace) -> int:
    """Print the table of comparisons with explanations; returns the exit status."""
    head = ("model", "compressor", "mean", "worse by", "margin", "holds", "bytes/step", "ms/step")
    table: list[tuple[str, ...]] = []
    verdicts: list[bool | None] = []
    for model in args.models:
        metric = MODELS[model].metric
        as_text = "{:.2%}".format if metric == "accuracy" else "{:.4f}".format
        plain = means(rows, model, PLAIN, args.seeds)
        for spec in dict.fromkeys([PLAIN, *args.compressors]):
            mean = means(rows, model, spec, args.seeds)
            if mean is None:  # can happen only for plain DDP: the others have just been trained
                continue
            against_plain = ("", "", "")
            if spec != PLAIN:
                margin = margin_of(model, spec, len(args.seeds))
                if plain is None or plain["steps"] != mean["steps"]:  # plain DDP was trained for other steps
                    verdicts.append(None)
                    against_plain = ("?", as_text(margin), "?")
                else:
                    worse = worse_by(model, mean[metric], plain[metric])
                    verdicts.append(worse <= margin)  # false with NaN
                    against_plain = (as_text(worse), as_text(margin), "yes" if verdicts[-1] else "NO")
            cost = (f"{mean['sent_nbytes_per_step']:,.0f}", f"{1e3 * mean['mean_step_s']:.1f}")
            table.append((model, "plain DDP" if spec == PLAIN else spec, as_text(mean[metric]), *against_plain, *cost))
    print(
        f"\nMeans over the seeds {args.seeds}: accuracy, or bits per byte for bytes_lm. Bytes are those of one rank.\n"
    )
    print(markdown_of_cells(head, table))
    print_reasons({spec.partition("(")[0] for spec in args.compressors})
    if verdicts.count(False):
        print(f"\n{verdicts.count(False)} of {len(verdicts)} margins are violated.")
        return 1
    if None in verdicts:
        print(f'\nNot everything could be compared: train "{PLAIN}" with the same models and seeds.')
        return 2
    return 0


def print_reasons(names: set[str]) -> None:
    """Print why some of the named compressors have a special recipe or margin."""
    for name, recipe in RECIPES.items():
        if name in names:
            print(f"{name} is trained by a special recipe: {recipe.reason}")
    for (model, name), (_, reason) in MARGIN_EXCEPTIONS.items():
        if name in names:
            print(f"{name} has a special margin for {model}: {reason}")


def draw(path: Path) -> None:
    try:
        from bench.lib.pareto import draw_convergence
    except ModuleNotFoundError as error:  # nothing is installed on machines with a GPU
        print(f"NOTE: no picture, {error.name} is not installed; draw it elsewhere: python -m bench.plot convergence")
    else:
        print(f"\n{draw_convergence(path)}")


def main() -> int:
    args = parse_args()
    if not args.models:
        return 2
    if in_rank():
        run_rank(args)
        return 0
    status = launch_ranks(RANKS)
    if status != 0:
        return status
    device = torch.device("cuda" if torch.cuda.device_count() >= RANKS else "cpu")  # the same choice as the ranks'
    path = csv_path(NAME, device)
    status = judge(read_csv(path), args)
    draw(path)
    return status


if __name__ == "__main__":
    sys.exit(main())
