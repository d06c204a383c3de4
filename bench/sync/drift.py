"""Training steps of ``sync.attach(model)`` while a link is throttled, cut or freed, against a plan for the new link.

    python -m bench.sync.drift --changes throttle
    python -m bench.sync.drift --networks 4 --models transformer_10m --changes throttle free cut --resume

Every model, network and change is a cell with links of its own (``sync/lab``, needs root). A copy of the model trains
with ``sync.attach(model)`` until its plan has been chosen, then ``--before`` steps more. Then all links between
machines change, and it trains ``--steps`` steps:

- ``throttle``: a tenth of the rate.
- ``free``: ten times the rate.
- ``cut``: nothing gets through for five seconds, then the old rate comes back.

At last another copy, with the same parameters, attaches itself anew on the links as they are then. Both take turns
with plain DDP, as in ``auto.py``.

Rows of ``bench/results/cpu/drift.csv`` have one arm each: ``followed`` for the copy that has met the change, ``fresh``
and ``plain``. ``ratio_to_fresh`` is the median ratio of its steps to those of the fresh copy in the same turns, with
its standard error, and ``chosen`` the plan at the end. For ``followed``, ``before_s`` is the median step before the
change, ``longest_s`` the longest step after it, ``settled_after`` the number of steps from the change to the last
change of the plan, ``decisions`` what the training has said meanwhile, and ``curve`` the medians of twenty equal parts
of ``--steps``.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from dataclasses import dataclass

import torch.distributed as dist

from bench.lib import cells, changes
from bench.lib.arms import PLAIN, WARM_UP, Arm, Setting
from bench.lib.cells import Cell, Measurement, Row, network_of
from bench.lib.contenders import SAFE, SETTLED, TUNED, summary
from bench.lib.cores import keep_to_own_cores
from bench.lib.rounds import slowest
from bench.lib.step_tables import bits_per_s
from bench.lib.turns import measured, ratio_of
from gckernels.sync.lab import Network, checked_rate

KEY = ("model", "network", "rate", "change", "arm")
PRINTED = ("arm", "median_s", "ratio_to_fresh", "ratio_error", "settled_after", "longest_s", "chosen")
ARMS = ("followed", "fresh", PLAIN)
CHANGES = ("throttle", "free", "cut")
FACTOR, CUT_S = 10, 5.0
BEFORE, STEPS, ROUNDS, ROUNDS_MIN, BUDGET_S = 100, 500, 30, 5, 30
PARTS, FAILING = 20, "machine1"
COURSE = ("settled_after", "decisions", "longest_s", "before_s", "curve")


def parse_args() -> argparse.Namespace:
    parser = cells.parser(__doc__, ROUNDS)
    cells.add_networks(parser, ["transformer_1m"])
    parser.add_argument("--rate", type=checked_rate, default="1gbit", help="of links before they are throttled or cut")
    parser.add_argument("--slow-rate", type=checked_rate, default="100mbit", help="of links before they are freed")
    parser.add_argument("--changes", nargs="+", choices=CHANGES, default=list(CHANGES))
    parser.add_argument("--before", type=int, default=BEFORE, help="steps between the choice of a plan and the change")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps after the change")
    parser.add_argument("--budget-s", type=int, default=BUDGET_S, help="seconds for the turns at the end of a cell")
    return parser.parse_args()


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """A cell for each model, network and change."""
    found = []
    for network, model, change in itertools.product(args.networks, args.models, args.changes):
        rate = args.slow_rate if change == "free" else args.rate
        columns: dict[str, str | int] = {"model": model, "network": network, "rate": rate, "change": change}
        columns |= {"before": args.before, "steps": args.steps, "max_rounds": args.rounds, "budget_s": args.budget_s}
        found.append(Cell(network_of(network, rate), columns, ARMS))
    return found


def rate_after(rate: str, change: str) -> str:
    """The rate of throttled or freed links, in the notation of ``tc``."""
    factor = FACTOR if change == "free" else 1 / FACTOR
    return f"{round(bits_per_s(rate) * factor / 1000)}kbit"


def measure(args: argparse.Namespace, cell: Cell) -> list[Row]:
    """Measure a cell; returns its rows."""
    keep_to_own_cores()
    setting = Setting.of(str(cell.columns["model"]), cell.network)
    followed = Arm(TUNED[f"auto, {SAFE}"], setting)
    trained(followed, SETTLED)
    before = trained(followed, args.before)
    _change(cell.network, str(cell.columns["change"]))
    after = trained(followed, args.steps)
    fresh = Arm(TUNED[f"auto, {SAFE}"], setting)
    fresh.model.load_state_dict(followed.model.state_dict())  # gradients with the same errors of compressors
    trained(fresh, SETTLED)
    arms = {"followed": followed, "fresh": fresh, PLAIN: Arm(PLAIN, setting)}
    for _ in range(WARM_UP):
        arms[PLAIN].ticks()
    turns = measured(arms, args.budget_s, ROUNDS_MIN, args.rounds)
    rows = []
    for name, arm in arms.items():
        ratio, error = ratio_of(turns[name].step_s, turns["fresh"].step_s)
        row: Row = {"arm": name, "rounds": len(turns[name].step_s)}
        row |= {"median_s": f"{statistics.median(turns[name].step_s):.6f}", "ratio_to_fresh": f"{ratio:.4f}"}
        row |= {"ratio_error": f"{error:.4f}"} | dict.fromkeys(COURSE, "")
        row["chosen"] = "nothing" if arm.attachment is None else summary(arm.attachment.plan)
        rows.append(row | (_course(before, after) if name == "followed" else {}))
        arm.close()
    return rows


@dataclass(frozen=True)
class Trained:
    """Some steps of an arm.

    Attributes:
        steps_s: seconds of each, on the slowest rank.
        plan_changes: numbers of the steps, from 1 up, after which the arm had another plan.
        decisions: texts of the decisions that fell in these steps.
    """

    steps_s: list[float]
    plan_changes: list[int]
    decisions: list[str]


def trained(arm: Arm, steps: int) -> Trained:
    """Train some steps of an arm that chooses its plan; collective."""
    assert arm.attachment is not None
    known, steps_s, plan_changes = len(arm.attachment.decisions), [], []
    for step in range(1, steps + 1):
        plan = arm.attachment.plan
        steps_s.append((arm.step_s(),))
        if arm.attachment.plan is not plan:
            plan_changes.append(step)
    decisions = [decision.text for decision in arm.attachment.decisions[known:]]
    if decisions and dist.get_rank() == 0:
        print("\n".join(decisions), flush=True)
    return Trained(slowest(steps_s)[:, 0].tolist(), plan_changes, decisions)


def _course(before: Trained, after: Trained) -> Row:
    """Columns that say how an arm has met the change."""
    size = max(1, len(after.steps_s) // PARTS)
    parts = [statistics.median(after.steps_s[first : first + size]) for first in range(0, len(after.steps_s), size)]
    row: Row = {"settled_after": max(after.plan_changes, default=0), "decisions": " / ".join(after.decisions)}
    row |= {"longest_s": f"{max(after.steps_s):.4f}", "before_s": f"{statistics.median(before.steps_s):.6f}"}
    return row | {"curve": " ".join(f"{seconds:.4f}" for seconds in parts)}


def _change(network: Network, change: str) -> None:
    """Throttle, free or cut the links between machines; collective."""
    if change == "cut":
        changes.cut_for(CUT_S, FAILING)
    else:
        changes.throttle(network, rate_after(network.rate, change))


def main() -> int:
    return cells.main(Measurement("drift", KEY, PRINTED, cells_of, measure), parse_args())


if __name__ == "__main__":
    sys.exit(main())
