"""Steps of trainings on links of a known rate whose updates are averaged, against plain DDP and compressed gradients.

    python -m bench.sync.updates --models transformer_10m --rates 200mbit
    python -m bench.sync.updates --rates none --arms "EFSignSGD, every 1" "Identity, every 1"
    python -m bench.sync.updates --models transformer_10m --rates 20mbit 200mbit --profile-s 60

Every model, network and rate is a cell with links of its own (``sync/lab``). Copies of one model learn the same random
answers with AdamW and take turns within one process: plain DDP; plain DDP again, which shows the noise floor; a
compressor attached to DDP; and ``sync.Updates`` where the arm says how many steps a round has, and how many
steps pass until its mean is there (``delay``). A turn is a round, of one step without updates.

Rows of ``bench/results/cpu/updates_steps.csv`` have the median time of a step, which is that of the round by its
number of steps, on the slowest rank; median and quartiles of the ratios to plain DDP in the same round of turns; and
the bytes that a rank sends per step by the count of the kernel on the interface. With ``--profile-s`` the machine is
profiled and plain steps are traced first, and rows of updates have the step that ``gckernels plan --every`` would
predict, and its relative error.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gckernels
from bench.lib import cells
from bench.lib.arms import AGAIN, PLAIN, Setting
from bench.lib.cells import Cell, Measurement, Row
from bench.lib.changes import throttle
from bench.lib.rounds import ratio_columns, slowest, take_turns, turns_within
from bench.lib.updates_tables import SIGNS, parts_of
from gckernels import sync
from gckernels.compressor import Compressor
from gckernels.planner import profile
from gckernels.planner.drafts.problem import Problem
from gckernels.planner.drafts.rounds import UpdateRounds
from gckernels.planner.timeline.pricing import Pricer
from gckernels.sync.lab import UNTHROTTLED, sent_nbytes
from gckernels.sync.plans.buckets import UPDATE_BUCKET_NBYTES, cut_buckets
from gckernels.sync.plans.plan import Frontend
from gckernels.sync.traces.model_trace import ModelTrace

KEY = ("model", "network", "rate", "arm")
PRINTED = ("arm", "median_s", "ratio_to_plain", "ratio_quartile_1", "ratio_quartile_3", "wire_nbytes", "error")
ARMS = ("BlockQuant(bits=4)", f"{SIGNS}, every 1", f"{SIGNS}, every 2", "BlockQuant(bits=4), every 30")
RATES = ("2mbit", "20mbit", "200mbit", UNTHROTTLED)
ROUNDS, ROUNDS_MIN, WARM_UP, BUDGET_S = 20, 3, 2, 90
FRESH_STEPS, TRACED_STEPS = 10, 20


def parse_args() -> argparse.Namespace:
    parser = cells.parser(__doc__, ROUNDS)
    cells.add_grid(parser, ["transformer_1m"], RATES, BUDGET_S)
    parser.add_argument("--arms", nargs="+", default=list(ARMS), metavar="ARM", help="arms beside plain DDP")
    parser.add_argument("--profile-s", type=int, default=0, help="seconds for a profile; 0 for no predictions")
    return parser.parse_args()


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """A cell for each model, network and rate."""
    return cells.grid(args, lambda network: [PLAIN, AGAIN, *args.arms], profile_s=args.profile_s)


class Training:
    """A copy of a model in training.

    Args:
        arm: the name of the arm.
        setting: the model and the data.
    """

    def __init__(self, arm: str, setting: Setting) -> None:
        workload, parts = setting.workload, parts_of(arm)
        spec, every = parts.spec, parts.every
        self.every, self.delay = every, int(parts.setting) if every and parts.setting else 0
        self._loss, self._batch, self._steps = workload.loss, setting.batch, every or 1
        model = workload.model()
        self.model = model if every else DistributedDataParallel(model, bucket_cap_mb=workload.bucket_cap_mb)
        parameters = self.model.parameters()
        self._optimizer: torch.optim.Optimizer
        if parts.is_direction:
            self._optimizer = torch.optim.SGD(parameters, lr=1e-4, weight_decay=0.01)
            sync.AdamDirection(self.model, self._optimizer)
        else:
            self._optimizer = torch.optim.AdamW(parameters, lr=1e-4)
        self.attachment: sync.Attachment | None = None
        if every:
            self.attachment = sync.attach(
                self.model, sync.Updates(self._optimizer, spec, every=every, delay=self.delay)
            )
        elif arm not in (PLAIN, AGAIN):
            plan = sync.uniform_plan(self.model, spec)
            decaying = (unit.decaying(float(parts.setting or 1)) for unit in plan.units)
            self.attachment = sync.attach(self.model, plan.with_units(decaying))

    def turn(self) -> tuple[float, float]:
        """Train a round; returns the seconds of a step, and the bytes that a step has sent. Collective."""
        before, start_s = sent_nbytes(), time.perf_counter()
        inputs, answers = self._batch
        for _ in range(self._steps):
            self._loss(self.model(inputs), answers).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
        step_s = (time.perf_counter() - start_s) / self._steps
        dist.barrier()  # all bytes have arrived
        return step_s, (sent_nbytes() - before) / self._steps

    def close(self) -> None:
        if self.attachment is not None:
            self.attachment.close()


def measure(args: argparse.Namespace, cell: Cell) -> list[Row]:
    """Measure the arms of a cell; returns their rows."""
    setting = Setting.of(str(cell.columns["model"]), cell.network)
    throttle(cell.network, UNTHROTTLED)  # all send everything when they begin
    trainings = {arm: Training(arm, setting) for arm in dict.fromkeys((PLAIN, *cell.arms))}
    turns = {arm: training.turn for arm, training in trainings.items()}
    take_turns(turns, 0, WARM_UP)
    trace = traced(trainings[PLAIN], cell.arms) if args.profile_s else None
    throttle(cell.network, cell.network.rate)
    predicted_s = {} if trace is None else predictions(trace, trainings, setting.topology, args.profile_s)
    measured = turns_within(turns, args.budget_s, ROUNDS_MIN, args.rounds)
    results = {arm: slowest(each) for arm, each in measured.items()}
    for training in trainings.values():
        training.close()
    plain_s = results[PLAIN][:, 0].tolist()
    rows: list[Row] = []
    for arm in cell.arms:
        step_s = results[arm][:, 0].tolist()
        row: Row = {"arm": arm, "rounds": len(step_s), "median_s": f"{statistics.median(step_s):.5f}"}
        row |= {"predicted_s": "", "error": ""}
        if arm in predicted_s:
            error = predicted_s[arm] / statistics.median(step_s) - 1
            row |= {"predicted_s": f"{predicted_s[arm]:.5f}", "error": f"{error:+.3f}"}
        row |= ratio_columns(step_s, plain_s, "ratio_to_plain")
        rows.append(row | {"wire_nbytes": f"{results[arm][:, 1].median():.0f}"})
    return rows


def methods_of(arms: Iterable[str]) -> list[Compressor]:
    """The compressors of arms, and those of what these send in other ways."""
    specs = dict.fromkeys(parts_of(arm).spec for arm in arms if arm not in (PLAIN, AGAIN))
    return [gckernels.from_spec(spec) for spec in dict.fromkeys(("Identity", "BlockQuant", *specs))]


def traced(plain: Training, arms: Iterable[str]) -> ModelTrace:
    """The trace of some steps of plain DDP; collective."""
    for _ in range(FRESH_STEPS):
        plain.turn()
    tracing = sync.trace_model(plain.model, steps=TRACED_STEPS, compressors=methods_of(arms))
    while not tracing.done:
        plain.turn()
    return tracing.trace


def predictions(
    trace: ModelTrace, trainings: Mapping[str, Training], topology: sync.Topology, profile_s: int
) -> dict[str, float]:
    """The predicted seconds of a step of each arm with rounds, by a profile of the ranks; collective."""
    pricer = Pricer(profile(seconds=profile_s, compressors=methods_of(trainings), topology=topology))
    found = {}
    for arm, training in trainings.items():
        if training.every and training.attachment is not None:
            rounds = UpdateRounds(trace, training.every, training.delay)
            problem = Problem(rounds.trace, pricer, Frontend.MODULE, rounds=rounds)
            plan = training.attachment.plan
            dtypes = {each.name: each.dtype for each in rounds.trace.tensors}
            buckets = enumerate(cut_buckets(plan, dtypes, UPDATE_BUCKET_NBYTES))
            launches = {each.plan.key: number for number, bucket in buckets for each in bucket.units}
            plan = plan.with_units(replace(unit, launch=launches[unit.key]) for unit in plan.units)
            found[arm] = problem.step_s(plan) / training.every
    return found


def main() -> int:
    return cells.main(Measurement("updates_steps", KEY, PRINTED, cells_of, measure), parse_args())


if __name__ == "__main__":
    sys.exit(main())
