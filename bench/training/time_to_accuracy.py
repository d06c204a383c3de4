"""Trainings on links of a known rate: the time until a network is as good as wanted, with and without compression.

    python -m bench.training.time_to_accuracy --models digits --rates 50mbit 1gbit
    python -m bench.training.time_to_accuracy --models bytes_lm --seeds 0 --arms "auto, safe" EFSignSGD --resume
    python -m bench.training.time_to_accuracy --models bytes_lm --rates 2mbit --arms "EFSignSGD, every 2" --stop 3.6

Every model, network, rate and seed is a cell with links of its own (``sync/lab``, needs root), and every arm trains the
model of ``recipes.py`` once in it: plain DDP, PyTorch's hooks, compressors everywhere with their recipes, and
``sync.attach(model)`` with the safe and the aggressive rule. Arms with ``every`` have ``sync.Updates`` with
rounds of as many steps. All begin with the same weights and see the same data. Twenty times in a training the network
is evaluated, which no time contains; inside a round it is the mean of those of the ranks. With ``--stop`` a training
ends when it is as good as that, with the steps of its learning rate unchanged.

Rows of ``bench/results/cpu/time_to_accuracy.csv`` have the metric at the end, and the seconds of training: of all steps
(``train_s``), and of the call that attaches (``attach_s``). ``early_s`` and ``late_s`` are the seconds, both included,
until an evaluation was at least as good as the targets of the model in :data:`TARGETS`, and empty if none was.
``wire_nbytes`` are the bytes of all steps by the kernel's counter on the interface, ``attach_nbytes`` those of the call
that attaches, which measures a profile, and ``cpu_s`` the seconds of a core, as means over the ranks. ``chosen`` is the
plan at the end, which a training that tries plans just then may not keep, and ``decisions`` what it has said.
``curve`` has all evaluations, as ``seconds:metric``. ``--table`` compares the rows with those of plain DDP, and
measures nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import itertools
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bench.lib import cells
from bench.lib.arms import HOOKS, ONE_BUCKET_MB, PLAIN, POWERSGD_HOOK, use_hook
from bench.lib.cells import Cell, Measurement, Row, network_of
from bench.lib.contenders import AGGRESSIVE, SAFE, summary
from bench.lib.record import csv_path, read_csv
from bench.lib.rounds import CPU
from bench.lib.training_tables import training_table
from bench.lib.updates_tables import parts_of
from bench.training import fashion_mnist, recipes
from bench.training.networks import NETWORKS, average_parameters
from examples import common
from gckernels import sync
from gckernels.sync.lab import checked_rate, sent_nbytes

KEY = ("model", "network", "rate", "seed", "arm")
PRINTED = ("arm", "metric", "train_s", "attach_s", "early_s", "late_s", "wire_nbytes", "cpu_s", "chosen")
MODELS = ("digits", "fashion_mnist", "bytes_lm")
AUTO_SAFE, AUTO_AGGRESSIVE = f"auto, {SAFE}", f"auto, {AGGRESSIVE}"
COMPRESSORS = ("Cast16", "BlockQuant", "BlockQuant(bits=4)", "EFSignSGD", "ChunkTopK", "PowerSGD(rank=4)")
ARMS = (PLAIN, AUTO_SAFE, AUTO_AGGRESSIVE, *HOOKS, *COMPRESSORS)
TARGETS = {"digits": (0.95, 0.98), "fashion_mnist": (0.85, 0.89), "bytes_lm": (3.5, 3.0)}
TARGETS["fashion_mnist_long"] = TARGETS["fashion_mnist"]
"""A target that is reached early in a training, and one that is reached late."""
EVALUATIONS = 20


def parse_args() -> argparse.Namespace:
    parser = cells.parser(__doc__, rounds=2)
    cells.add_networks(parser, MODELS, known=TARGETS)
    parser.add_argument("--rates", nargs="+", type=checked_rate, default=["50mbit", "200mbit", "1gbit"])
    parser.add_argument("--seeds", nargs="+", type=int, default=list(recipes.SEEDS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), metavar="ARM")
    parser.add_argument("--stop", type=float, help="a metric with which a training ends early")
    parser.add_argument("--table", action="store_true", help="print a table of the rows, and measure nothing")
    return parser.parse_args()


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """A cell for each model, network, rate and seed."""
    found = []
    for network, model, rate, seed in itertools.product(args.networks, args.models, args.rates, args.seeds):
        if model.startswith("fashion_mnist") and not fashion_mnist.is_installed():
            continue
        columns: dict[str, str | int] = {"model": model, "network": network, "rate": rate, "seed": seed}
        found.append(Cell(network_of(network, rate), columns, tuple(args.arms)))
    return found


class Evaluated(common.StepTimer):
    """Times the steps of a training, and evaluates the network between some of them.

    Args:
        model: how it is evaluated.
        network: the network.
        differs: whether its parameters differ between ranks; then the mean is evaluated.
        stop: a metric that ends the training, with a :class:`Stop`; ``None`` for no such one.

    Attributes:
        every: the number of steps between two evaluations.
        curve: seconds of training, and the metric after them.
        cpu_s: seconds of a core that the steps took.
    """

    def __init__(
        self, model: recipes.Model, network: nn.Module, differs: bool = False, stop: float | None = None
    ) -> None:
        super().__init__(CPU)
        self.curve: list[tuple[float, float]] = []
        self.cpu_s = 0.0
        self._model, self._network, self._differs, self._stop = model, network, differs, stop
        self.every = max(1, model.steps // EVALUATIONS)

    def __enter__(self) -> Evaluated:
        self._start_cpu_s = time.process_time()
        super().__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        super().__exit__(*exc)
        self.cpu_s += time.process_time() - self._start_cpu_s
        steps = len(self._steps_s)
        if steps % self.every == 0 or steps == self._model.steps:
            network = self._network
            if self._differs:
                average_parameters(network := copy.deepcopy(network))
            self.curve.append((sum(self._steps_s), metric_of(self._model, network)))
            if self._stop is not None and is_reached(self._stop, self.curve[-1][1], self._model.higher_is_better):
                raise Stop


class Stop(Exception):
    """A training is as good as wanted."""


def is_reached(target: float, metric: float, higher_is_better: bool) -> bool:
    """Whether a metric is at least as good as a target."""
    return metric >= target if higher_is_better else metric <= target


def metric_of(model: recipes.Model, network: nn.Module) -> float:
    """The metric of a network by which its model is judged; NaN if the training has diverged."""
    if not all(bool(parameter.isfinite().all()) for parameter in network.parameters()):
        return float("nan")
    accuracy, bits_per_byte = model.evaluate(network, CPU)
    found = {"accuracy": accuracy, "bits_per_byte": bits_per_byte}[model.metric]
    assert found is not None
    return found


def measure(args: argparse.Namespace, cell: Cell) -> list[Row]:
    """Train the model with every arm of a cell; returns their rows."""
    rows = []
    for arm in cell.arms:
        rows.append(trained(str(cell.columns["model"]), arm, int(cell.columns["seed"]), args.stop))
        gc.collect()  # DDP is part of a reference cycle that would keep its buckets
        if dist.get_rank() == 0:
            print(", ".join(f"{name} {rows[-1][name]}" for name in PRINTED), flush=True)
    return rows


def trained(model_name: str, arm: str, seed: int, stop: float | None = None) -> Row:
    """The row of one training; collective."""
    model, parts = recipes.MODELS[model_name], parts_of(arm)
    spec, every = parts.spec, parts.every
    recipe = recipes.Recipe() if every or arm in (PLAIN, AUTO_SAFE, AUTO_AGGRESSIVE, *HOOKS) else recipes.recipe_of(arm)
    torch.manual_seed(seed)
    network, group = model.build(), dist.new_group()
    cap_mb = ONE_BUCKET_MB if arm == POWERSGD_HOOK else None
    ddp = None if every else DistributedDataParallel(network, process_group=group, bucket_cap_mb=cap_mb)
    timer = Evaluated(model, network, bool(every), stop)
    handle: sync.Attachment | None = None
    attach_s, start_nbytes, attached_nbytes = 0.0, sent_nbytes(), 0

    def prepare(optimizer: torch.optim.Optimizer) -> None:
        nonlocal handle, attach_s, start_nbytes, attached_nbytes
        dist.barrier()
        start_s, start_nbytes = time.perf_counter(), sent_nbytes()
        if ddp is None:
            rounds = parts.rounds(NETWORKS[model_name].rates(model.steps))
            handle = sync.attach(network, sync.Updates(optimizer, spec, every=rounds), seed=seed)
        else:
            handle = attached(ddp, arm, model, recipe, seed, group)
        attach_s, attached_nbytes = time.perf_counter() - start_s, sent_nbytes()

    with contextlib.suppress(Stop):
        model.train(network if ddp is None else ddp, CPU, timer, recipe, prepare)
    dist.barrier()
    nbytes = (attached_nbytes - start_nbytes, sent_nbytes() - attached_nbytes)
    means = torch.tensor([*nbytes, timer.cpu_s], dtype=torch.float64)
    dist.all_reduce(means)
    attach_nbytes, wire_nbytes, cpu_s = (means / dist.get_world_size()).tolist()
    row: Row = {"arm": arm, "metric": f"{timer.curve[-1][1]:.4f}", "train_s": f"{timer.curve[-1][0]:.2f}"}
    row |= {"attach_s": f"{attach_s:.2f}", "attach_nbytes": f"{attach_nbytes:.0f}"}
    for name, target in zip(("early_s", "late_s"), TARGETS[model_name], strict=True):
        row[name] = seconds_to(target, timer.curve, attach_s, model.higher_is_better)
    row |= {
        "wire_nbytes": f"{wire_nbytes:.0f}",
        "cpu_s": f"{cpu_s:.2f}",
        "steps": min(len(timer.curve) * timer.every, model.steps),
    }
    row["chosen"] = "" if handle is None else summary(handle.plan)
    decisions = [] if handle is None else handle.decisions
    row["decisions"] = " / ".join(f"step {each.step}: {each.text}" for each in decisions)
    row["curve"] = " ".join(f"{seconds:.2f}:{metric:.4f}" for seconds, metric in timer.curve)
    if handle is not None:
        handle.close()
    return row


def attached(
    ddp: DistributedDataParallel,
    arm: str,
    model: recipes.Model,
    recipe: recipes.Recipe,
    seed: int,
    group: dist.ProcessGroup,
) -> sync.Attachment | None:
    """The attachment of an arm to DDP; ``None`` for plain DDP and PyTorch's hooks, which are registered."""
    if arm == PLAIN:
        return None
    if arm in HOOKS:
        use_hook(ddp, arm, group)
        return None
    if arm in (AUTO_SAFE, AUTO_AGGRESSIVE):
        return sync.attach(ddp, sync.Auto(accuracy=arm.rpartition(", ")[2], steps=model.steps))
    compressor = recipe.compressor(arm, model.adamw, model.steps)
    plan = sync.uniform_plan(ddp, compressor, exempt=recipe.exempt)
    return sync.attach(ddp, plan, seed=seed, start_step=int(recipe.exact * model.steps))


def seconds_to(target: float, curve: list[tuple[float, float]], attach_s: float, higher_is_better: bool) -> str:
    """The seconds until an evaluation reached the target, with those before the first step; empty if none did."""
    for seconds, metric in curve:
        if is_reached(target, metric, higher_is_better):
            return f"{attach_s + seconds:.2f}"
    return ""


def main() -> int:
    args = parse_args()
    if args.table:
        print(training_table(read_csv(csv_path("time_to_accuracy", CPU)), read_csv(csv_path("convergence", CPU))))
        return 0
    return cells.main(Measurement("time_to_accuracy", KEY, PRINTED, cells_of, measure), args)


if __name__ == "__main__":
    sys.exit(main())
