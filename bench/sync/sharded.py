"""Whole training steps of models of FSDP2 on links of a known rate: FSDP's own collectives, and attachments.

    python -m bench.sync.sharded --rates 20mbit none
    python -m bench.sync.sharded --networks 2x2 --local-rate 1gbit --rates 20mbit 100mbit
    python -m bench.sync.sharded --models transformer_10m --rates 200mbit --arms "BlockQuant(bits=4)" auto

Every model, network and rate is a cell with links of its own (``sync/lab``). Over machines with one rank each the model
is sharded over all ranks; over machines with several, its shards are inside the machines and its replicas between
them, unless an arm ends with ``, shards over all ranks``, or with ``, added up inside machines``, where its plan has a
topology as well. Copies of the model take turns within one process: FSDP's own
collectives; those again, which shows the noise floor; and an attachment for each further arm. An arm is a compressor,
or ``auto``, which first trains until its plan stands; with ``, weights`` and a compressor, that encodes the parameters
that are gathered, or may do so.

Rows of ``bench/results/cpu/sharded.csv`` have the median time of a step, which ends when the slowest rank has finished
it, median and quartiles of the ratios to FSDP's own step in the same round, and the bytes that a rank sends in a step
by the count of the kernel on the interface.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.lib import cells
from bench.lib.cells import Cell, Measurement, Row
from bench.lib.models import WORKLOADS
from bench.lib.rounds import ratio_columns, slowest, take_turns, turns_within
from bench.lib.sharded_tables import AGAIN, FLAT, LEVELS, NATIVE, WEIGHTS
from gckernels import sync
from gckernels.sync.lab import UNTHROTTLED, Network, sent_nbytes

KEY = ("model", "network", "rate", "arm")
PRINTED = ("arm", "median_s", "ratio_to_native", "ratio_quartile_1", "ratio_quartile_3", "wire_nbytes", "chosen")
AUTO = "auto"
ARMS = (NATIVE, AGAIN, "Identity", "BlockQuant(bits=4)", "EFSignSGD", AUTO)
WITH_WEIGHTS = (
    "BlockQuant(bits=4), weights BlockQuant",
    "BlockQuant(bits=4), weights BlockQuant(bits=4)",
    "auto, weights BlockQuant",
)
RATES = ("20mbit", "100mbit", UNTHROTTLED)
ROUNDS, ROUNDS_MIN, WARM_UP, TUNING_STEPS, BUDGET_S = 20, 5, 3, 150, 60


def parse_args() -> argparse.Namespace:
    parser = cells.parser(__doc__, ROUNDS)
    cells.add_grid(parser, ["transformer_1m"], RATES, BUDGET_S)
    parser.add_argument("--arms", nargs="+", metavar="ARM", help="arms beside FSDP's own collectives")
    return parser.parse_args()


def cells_of(args: argparse.Namespace) -> list[Cell]:
    """A cell for each model, network and rate."""

    def arms(network: Network) -> list[str]:
        flat = (f"{arm}{ending}" for ending in (FLAT, LEVELS) for arm in (NATIVE, *WITH_WEIGHTS[:2]))
        flat = (arm for arm in flat if arm != NATIVE + LEVELS)
        usual = (*ARMS, *(flat if network.ranks_per_machine > 1 else WITH_WEIGHTS))
        return [NATIVE, *(args.arms or usual)]

    return cells.grid(args, arms)


class ShardedArm:
    """A model of FSDP2 with its attachment and its optimizer.

    Args:
        spec: the arm.
        model: the name of its model in ``models.py``.
        network: the ranks and machines.
    """

    def __init__(self, spec: str, model: str, network: Network) -> None:
        workload = WORKLOADS[model]
        self._loss, self.model = workload.loss, workload.model()
        self._batch = workload.batch(torch.Generator().manual_seed(dist.get_rank()))
        inside = network.ranks_per_machine
        if inside > 1 and not spec.endswith((FLAT, LEVELS)):
            mesh = init_device_mesh("cpu", (network.machines, inside), mesh_dim_names=("replicate", "shard"))
        else:
            mesh = init_device_mesh("cpu", (network.ranks,))
        for layers in self.model.children():
            for layer in layers if isinstance(layers, torch.nn.Sequential) else ():
                fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.attachment: sync.Attachment | None = None
        plan, _, weights = spec.removesuffix(FLAT).removesuffix(LEVELS).partition(WEIGHTS)
        self.is_tuned = plan == AUTO
        if self.is_tuned:
            self.attachment = sync.attach(self.model, weights=weights or None)
        elif plan not in (NATIVE, AGAIN):
            topology = (network.machines, inside) if spec.endswith(LEVELS) else None
            made = sync.uniform_plan(self.model, plan, topology=topology)
            self.attachment = sync.attach(self.model, made, weights=weights or None)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self) -> tuple[float, float]:
        """Train one step; returns its seconds, and the bytes that the interface has sent meanwhile; collective."""
        inputs, answers = self._batch
        before, start_s = sent_nbytes(), time.perf_counter()
        self._loss(self.model(inputs), answers).backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        step_s = time.perf_counter() - start_s
        dist.barrier()  # all bytes of the step have arrived
        return step_s, float(sent_nbytes() - before)

    def tune(self) -> None:
        """Train until the plan of an automatic attachment stands."""
        for _ in range(TUNING_STEPS):
            self.step()


def measure(args: argparse.Namespace, cell: Cell) -> list[Row]:
    """Measure the arms of a cell; returns their rows."""
    arms = {spec: ShardedArm(spec, str(cell.columns["model"]), cell.network) for spec in cell.arms}
    for arm in arms.values():
        if arm.is_tuned:
            arm.tune()
    steps = {spec: arm.step for spec, arm in arms.items()}
    take_turns(steps, 0, WARM_UP)
    results = turns_within(steps, args.budget_s, ROUNDS_MIN, args.rounds)
    seconds = {spec: slowest(each)[:, 0].tolist() for spec, each in results.items()}
    rows: list[Row] = []
    for spec, arm in arms.items():
        attachment = arm.attachment
        row: Row = {"arm": spec, "rounds": len(seconds[spec]), "median_s": f"{statistics.median(seconds[spec]):.5f}"}
        row |= ratio_columns(seconds[spec], seconds[NATIVE], "ratio_to_native")
        row |= {"wire_nbytes": f"{statistics.mean(nbytes for _, nbytes in results[spec]):.0f}"}
        row |= {"residual_nbytes": 0 if attachment is None else attachment.residual_nbytes()}
        row |= {"chosen": "" if attachment is None else repr(attachment)}
        rows.append(row)
        if attachment is not None:
            attachment.close()
    return rows


def main() -> int:
    return cells.main(Measurement("sharded", KEY, PRINTED, cells_of, measure), parse_args())


if __name__ == "__main__":
    sys.exit(main())
