"""Whole training steps of ``sync.attach(model)``, which chooses its plan while it trains, against everything else.

    python -m bench.sync.auto --models transformer_10m --rates 200mbit 1gbit none
    python -m bench.sync.auto --networks 4 2x2 --models digits embedding --resume
    python -m bench.sync.auto --models transformer_1m --rates none --arms "plain again" "auto, safe" --rounds 200
    python -m bench.sync.auto --race

Every model, network and rate is a cell with links of its own (``sync/lab``, needs root). Every rank keeps to its part
of the cores, whatever the arm. In each cell a copy of the model is attached to with the safe rule, and another one
with the aggressive rule. Each trains until its plan has been chosen, on links of that rate. Then more copies compete:
plain DDP; plain DDP again, which shows the noise floor; DDP with PyTorch's hooks; each compressor everywhere; and the
plans of all policies, for a profile and a trace of this cell. Arms of the same plan are measured once (column
``same_as``). All take turns of several steps within one process, ``--at-once`` of them at a time beside plain DDP: a
copy of a model of 10 million parameters takes 200 MB per rank.

Rows of ``bench/results/cpu/auto.csv`` have medians over the rounds, on the slowest rank. ``ratio_to_plain`` compares
with plain DDP in the same rounds, and ``ratio_error`` is the standard error of that median. ``wire_nbytes`` are bytes
per step by the kernel's counter on the interface, as a mean over the ranks, and ``cpu_s`` the seconds of a core.
``accuracy`` is the strictest rule that allows every compressor of the plan where it is, by the errors that were
recorded in the cell. It is "looser" if none does, as for the signs of an embedding's gradient. ``chosen`` is the plan
at the end by shares of its elements, and ``decision`` what the training has said last. It goes on to watch its steps
while the arms take turns, and may choose anew.
``attach_s`` are the seconds of the call that attaches, ``tuning_s`` those of the steps until the plan was chosen, and
``pause_s`` those by which the longest of these steps was longer than a plain one. ``stolen`` is the part of the cores
that a host of virtual machines gave to others meanwhile. A policy without a plan has a row with 0 rounds.

``--race`` measures whether predictions gain anything: the arm "predicted, safe" tries also the plans that are predicted
from what the trials of uniform plans have measured. Its rows are in ``bench/results/cpu/race.csv``.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Mapping, Sequence

import torch.distributed as dist

import gckernels
from bench.lib import cells
from bench.lib.arms import AGAIN, COMPRESSORS, HOOKS, PLAIN, THROUGH, WARM_UP, Arm, Setting, plan_of
from bench.lib.cells import Cell, Measurement, Row
from bench.lib.changes import throttle
from bench.lib.contenders import (
    ARMS,
    POLICY_ARMS,
    RACE_ARMS,
    TUNED,
    TUNING_STEPS,
    Planned,
    accuracy_of,
    accuracy_on,
    checked_contender,
    distinct,
    from_rank_0,
    policy_plans,
    summary,
)
from bench.lib.cores import keep_to_own_cores
from bench.lib.rounds import slowest
from bench.lib.turns import Turns, measured, ratio_of
from gckernels import planner, sync
from gckernels.planner.timeline.pricing import Pricer
from gckernels.sync.lab import UNTHROTTLED

KEY = ("model", "network", "rate", "arm")
PRINTED = ("arm", "accuracy", "median_s", "ratio_to_plain", "ratio_error", "wire_nbytes", "cpu_s")
MODELS = ("digits", "fashion_mnist", "transformer_1m", "transformer_10m", "embedding")
RATES = ("50mbit", "200mbit", "1gbit", "10gbit", UNTHROTTLED)
ROUNDS, ROUNDS_MIN, BUDGET_S, AT_ONCE = 30, 5, 40, 12
PROFILE_S, RECORDED_STEPS = 45, 5


def parse_args() -> argparse.Namespace:
    parser = cells.parser(__doc__, ROUNDS)
    cells.add_grid(parser, MODELS, RATES, BUDGET_S)
    arms = parser.add_argument("--arms", nargs="+", type=checked_contender, default=list(ARMS), metavar="ARM")
    arms.help = "arms beside plain DDP"
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="arms in memory beside those that have chosen")
    parser.add_argument("--profile-s", type=int, default=PROFILE_S, help="seconds for the profile that policies need")
    parser.add_argument("--race", action="store_true", help="compare the plans with and without predictions")
    return parser.parse_args()


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """A cell for each model, network and rate."""
    return cells.grid(args, lambda network: RACE_ARMS if args.race else (PLAIN, AGAIN, *args.arms))


def measure(args: argparse.Namespace, cell: Cell) -> list[Row]:
    """Measure the arms of a cell; returns their rows."""
    keep_to_own_cores()
    setting = Setting.of(str(cell.columns["model"]), cell.network)
    tuned, columns = {}, {}
    for name in [name for name in TUNED if name in cell.arms]:
        tuned[name], columns[name] = _tuned(name, setting)
    plans, accuracies = _plans(cell, setting, args.profile_s)
    in_place_of = distinct({name: planned.plan for name, planned in plans.items()})
    names = [name for name in cell.arms if name != PLAIN and in_place_of.get(name, name) == name]
    names = [name for name in names if name in plans or name not in POLICY_ARMS]
    plain = _ready(cell, setting, [PLAIN], {})[PLAIN]
    rounds: list[dict[str, Turns]] = []
    for first in range(0, max(len(names), 1), args.at_once):
        piece = names[first : first + args.at_once]
        arms = _ready(cell, setting, [name for name in piece if name not in tuned], plans)
        arms |= {name: tuned[name] for name in piece if name in tuned}
        rounds.append(measured({PLAIN: plain} | arms, args.budget_s, ROUNDS_MIN, args.rounds))
        for name in piece:
            columns[name] = _columns(arms[name], plans.get(name)) | columns.get(name, {})
            _end(name, arms.pop(name))
            tuned.pop(name, None)
        gc.collect()  # DDP is part of a reference cycle that would keep its buckets
    columns[PLAIN] = _columns(plain)
    _end(PLAIN, plain)
    rows = {name: _row(name, rounds) | columns[name] for name in columns}
    for name in [name for name in cell.arms if name not in rows]:
        other = in_place_of.get(name)  # none for a policy without a plan
        rows[name] = (rows[PLAIN] | {"rounds": 0} if other is None else rows[other]) | {"arm": name, "same_as": other}
    for name, row in rows.items():
        row["accuracy"] = accuracies.get(name, accuracy_of(name))
    return [rows[name] for name in cell.arms]


def _ready(cell: Cell, setting: Setting, names: Sequence[str], plans: Mapping[str, Planned]) -> dict[str, Arm]:
    """New arms after their first steps, which send everything: they run on links that are not throttled; collective."""
    throttle(cell.network, UNTHROTTLED)
    arms = {name: Arm(plans[name].plan if name in plans else name, setting) for name in names}
    for arm in arms.values():
        for _ in range(WARM_UP):
            arm.ticks()
    throttle(cell.network, cell.network.rate)
    return arms


def _tuned(name: str, setting: Setting) -> tuple[Arm, Row]:
    """An arm that has chosen its plan, and what that took; collective."""
    dist.barrier()
    arm = Arm(TUNED[name], setting)
    assert arm.attachment is not None
    steps_s = slowest([(arm.step_s(),) for _ in range(TUNING_STEPS[name])])[:, 0].tolist()
    row: Row = {"attach_s": f"{arm.attach_s:.2f}", "tuning_s": f"{sum(steps_s):.2f}"}
    row |= {"tuning_steps": len(steps_s), "pause_s": f"{max(steps_s) - max(steps_s[1:4]):.2f}"}
    for decision in arm.attachment.decisions:
        if dist.get_rank() == 0:
            print(f"{name}, step {decision.step}: {decision.text}", flush=True)
    return arm, row


def _plans(cell: Cell, setting: Setting, profile_s: int) -> tuple[dict[str, Planned], dict[str, str]]:
    """The plans of compressors and policies, and the accuracies of the former, by the name of their arm; collective.

    The profile that policies need is measured on links of the cell's rate.
    """
    model = Arm(PLAIN, setting)
    names = [name for name in cell.arms if name not in (PLAIN, AGAIN, *TUNED, *HOOKS, *POLICY_ARMS)]
    plans = {name: Planned(plan_of(name, model.model, setting.topology)) for name in names}
    policies = [name for name in cell.arms if name in POLICY_ARMS]
    if not plans and not policies:
        return {}, {}
    specs = {*COMPRESSORS, *(name.partition(THROUGH)[0] for name in plans)} - {"Identity"}
    methods = [gckernels.from_spec(spec) for spec in sorted(specs)]
    throttle(cell.network, UNTHROTTLED)  # no recorded time has communication
    recording = sync.trace_model(model.model, steps=RECORDED_STEPS, compressors=methods)
    while not recording.done:
        model.ticks()
    throttle(cell.network, cell.network.rate)
    accuracies = {name: accuracy_on(planned.plan, recording.trace) for name, planned in plans.items()}
    if policies:
        profile = planner.profile(seconds=profile_s, compressors=methods, topology=setting.topology)
        plans |= from_rank_0(lambda: policy_plans(policies, recording.trace, Pricer(profile)))
    return plans, accuracies


def _columns(arm: Arm, planned: Planned | None = None) -> Row:
    """Columns that say what an arm is and sends; collective."""
    row: Row = {"sent_nbytes": f"{arm.sent_nbytes():.0f}", "residual_nbytes": arm.residual_nbytes()}
    row |= dict.fromkeys(("chosen", "decision", "decisions", "predicted_s", "same_as"), "")
    row |= dict.fromkeys(("attach_s", "tuning_s", "tuning_steps", "pause_s"), "")
    if arm.attachment is not None:
        row["chosen"] = summary(arm.attachment.plan)
        row["decisions"] = len(arm.attachment.decisions)
        if arm.attachment.decisions:
            decision = arm.attachment.decisions[-1]
            row["decision"] = f"step {decision.step}: {decision.text}"
            row["predicted_s"] = "" if decision.predicted_s is None else f"{decision.predicted_s:.6f}"
    if planned is not None and planned.step_s is not None:
        row["predicted_s"] = f"{planned.step_s:.6f}"
    return row


def _end(name: str, arm: Arm) -> None:
    """Close an arm.

    Raises:
        SystemExit: the arm has diverged.
    """
    if not arm.is_finite():
        raise SystemExit(f"{name}: the model has diverged: steps with NaN take another time than steps with numbers")
    arm.close()


def _row(name: str, rounds: list[dict[str, Turns]]) -> Row:
    """The row of an arm from the rounds of all pieces in which it was."""
    mine = [piece for piece in rounds if name in piece]
    turns = sum((piece[name] for piece in mine), Turns((), (), ()))
    plain = sum((piece[PLAIN] for piece in mine), Turns((), (), ()))
    ratio, error = ratio_of(turns.step_s, plain.step_s)
    row: Row = {"arm": name, "accuracy": "", "rounds": len(turns.step_s)}
    row |= {"median_s": f"{statistics.median(turns.step_s):.6f}", "ratio_to_plain": f"{ratio:.4f}"}
    row |= {"ratio_error": f"{error:.4f}", "wire_nbytes": f"{statistics.median(turns.wire_nbytes):.0f}"}
    row["cpu_s"] = f"{statistics.median(turns.cpu_s):.6f}"
    return row


def main() -> int:
    args = parse_args()
    return cells.main(Measurement("race" if args.race else "auto", KEY, PRINTED, cells_of, measure), args)


if __name__ == "__main__":
    sys.exit(main())
