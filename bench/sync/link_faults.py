"""Training steps while a link fails: it is cut for five seconds, cut for good, or slows down to a tenth of its rate.

    python -m bench.sync.link_faults
    python -m bench.sync.link_faults --world-size 4 --rate 1gbit --faults pause --arms plain EFSignSGD

Every fault and every arm gets a network of its own (``sync/lab``, needs root), because a fault can leave a process
group that is of no more use. The link of rank 1 fails between two steps. Rows of ``bench/results/cpu/link_faults.csv``
have the median step before the fault, and for each fault:

- ``pause``: the link is cut, and restored five seconds later. ``fault_s`` is the step that met the cut, on the slowest
  rank, and ``after_s`` the median of the steps after it.
- ``cut``: the link stays cut. ``fault_s`` is the time until the last rank had an exception, and ``raised`` the number
  of ranks that had one. The timeout of the process group is in the column ``timeout_s``.
- ``slow``: the link gets a tenth of its rate. ``after_s`` is the median step with it, and ``expected_s`` the bound of
  such a step: forward, the larger of backward and the wire at the slow link's goodput, and the optimizer.

``equal`` says whether all ranks had the same parameters at the end, bit for bit.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import statistics
import sys
import time

import torch.distributed as dist

from bench.lib import cells, changes
from bench.lib.arms import FP16_HOOK, PLAIN, WARM_UP, Arm, Setting
from bench.lib.bounds import Alone
from bench.lib.cells import Cell, Measurement, Row
from bench.lib.goodput import goodput
from bench.lib.sizes import two_or_more
from bench.lib.step_tables import bits_per_s
from gckernels.sync.lab import Network, checked_rate

KEY = ("fault", "world_size", "rate", "arm")
PRINTED = ("arm", "before_s", "fault_s", "after_s", "expected_s", "raised", "equal")
FAULTS = ("pause", "cut", "slow")
ARMS = (PLAIN, FP16_HOOK, "Identity", "Cast16", "BlockQuant", "EFSignSGD", "TopK(ratio=0.01)", "PowerSGD(rank=4)")
STEPS, PAUSE_S, TIMEOUT_S = 10, 5.0, 20.0
MODEL, FAILING = "transformer_1m", 1


def parse_args() -> argparse.Namespace:
    parser = cells.parser(__doc__, STEPS)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--world-size", type=two_or_more, default=2)
    parser.add_argument("--rate", type=checked_rate, default="100mbit")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), metavar="ARM")
    return parser.parse_args()


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """A cell for each fault and arm."""
    where = {"model": MODEL, "world_size": args.world_size, "rate": args.rate, "timeout_s": f"{TIMEOUT_S:g}"}
    network = Network(args.world_size, args.rate)
    return [
        Cell(network, {"fault": fault} | where | {"rounds": args.rounds}, (arm,))
        for fault in args.faults
        for arm in args.arms
    ]


def measure(args: argparse.Namespace, cell: Cell) -> list[Row]:
    """Measure an arm while the link fails; returns its row."""
    (spec,) = cell.arms
    arm = Arm(spec, Setting.of(MODEL, cell.network), datetime.timedelta(seconds=TIMEOUT_S))
    for _ in range(WARM_UP):
        arm.ticks()
    row: Row = {"arm": spec, "before_s": _median_step_s(arm, args.rounds)}
    row |= dict.fromkeys(("fault_s", "after_s", "expected_s", "raised", "equal"), "")
    dist.barrier()
    match str(cell.columns["fault"]):
        case "pause":
            row |= _pause(arm, args.rounds)
        case "cut":
            row |= _cut(arm)
        case "slow":
            row |= _slow(arm, args.rounds, args.rate)
    arm.close()
    return [row]


def _pause(arm: Arm, rounds: int) -> Row:
    """Cut the link, and restore it a few seconds later."""
    changes.cut_for(PAUSE_S, FAILING)
    fault_s = max(changes.gather(arm.step_s()))
    return {"fault_s": f"{fault_s:.3f}", "after_s": _median_step_s(arm, rounds), "equal": _equal(arm)}


def _cut(arm: Arm) -> Row:
    """Cut the link, and restore it when all ranks have noticed."""
    changes.change_for_all("cut", FAILING)
    start, raised = time.perf_counter(), False
    try:
        arm.ticks()
    except RuntimeError:
        raised = True
    found = changes.gather((raised, time.perf_counter() - start))
    changes.change_for_all("restore", FAILING)
    return {"fault_s": f"{max(seconds for _, seconds in found):.3f}", "raised": sum(raised for raised, _ in found)}


def _slow(arm: Arm, rounds: int, rate: str) -> Row:
    """Throttle the link to a tenth of its rate."""
    changes.change_for_all("throttle", FAILING, f"{round(bits_per_s(rate) / 10_000)}kbit")
    arm.step_s()  # the connections find their new rate
    after_s = _median_step_s(arm, rounds)
    equal = _equal(arm)
    forward_s, backward_s, optimizer_s = (max(values) for values in zip(*changes.gather(arm.alone()), strict=True))
    wire_s = arm.sent_nbytes() / goodput()
    expected_s = Alone(forward_s, backward_s, optimizer_s, ddp_backward_s=0.0, wire_s=wire_s).bound_s()
    return {"after_s": after_s, "expected_s": f"{expected_s:.5f}", "equal": equal}


def _median_step_s(arm: Arm, rounds: int) -> str:
    """The median of the seconds of steps, each on the slowest rank; collective."""
    seconds = [max(changes.gather(arm.step_s())) for _ in range(rounds)]
    return f"{statistics.median(seconds):.5f}"


def _equal(arm: Arm) -> bool:
    """Whether all ranks have the same parameters, bit for bit; collective."""
    digest = hashlib.sha256()
    for each in arm.model.parameters():
        digest.update(each.detach().numpy().tobytes())
    return len(set(changes.gather(digest.digest()))) == 1


def main() -> int:
    return cells.main(Measurement("link_faults", KEY, PRINTED, cells_of, measure), parse_args())


if __name__ == "__main__":
    sys.exit(main())
