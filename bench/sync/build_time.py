"""Time that one rank of a large job needs to check a plan and to build its messages, on one core.

    python -m bench.sync.build_time

The model is a transformer with 100 layers and 1200 parameters, measured for several programs and numbers of ranks.
Nothing is sent and no process group is created. Caches are cleared before every repetition. The results are medians of
processor time in seconds: ``check_s`` for checking the plan, ``build_s`` from there until messages can be submitted,
including the allocation of gradients, residuals and buffers. With narrow layers the allocation is negligible, and the
rest is Python's own time.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Mapping

import torch

import gckernels
from bench.lib.record import merge_csv
from gckernels import sync
from gckernels.sync.programs import sizes as programs
from gckernels.sync.resources.memory_spaces import Places
from harness.one_of_many import OneOfMany, built, transformer

LAYERS, HIDDEN = 100, (32, 256)
BUCKET_CAP_MB = 25
REPETITIONS = 7
RANK = 1
SETTINGS = (
    ("allgather", sync.programs.ALLGATHER, sync.Topology(8)),
    ("alltoall", sync.programs.ALLTOALL, sync.Topology(1024)),
    ("hierarchical", sync.programs.HIERARCHICAL, sync.Topology(128, 8)),
    ("parameter_server", sync.programs.PARAMETER_SERVER, sync.Topology(1024)),
    ("ring", sync.programs.ring(8), sync.Topology(8)),
)
KEY = ("program", "machines", "devices", "hidden")


def seconds(
    plan: sync.Plan, parameters: Mapping[str, torch.nn.Parameter], world: OneOfMany
) -> tuple[float, float, int]:
    """Seconds of checking the plan, seconds of building the messages, and the number of messages."""
    programs._sizes_of.cache_clear()
    gc.collect()
    start = time.process_time()
    plan.check(parameters.items(), world.world_size)
    checked = time.process_time()
    messages = built(plan, parameters, world, BUCKET_CAP_MB)
    return checked - start, time.process_time() - checked, len(messages)


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for hidden in HIDDEN:
        parameters = transformer(LAYERS, hidden, "cpu")
        for name, program, topology in SETTINGS:
            plan = sync.uniform_plan(
                parameters.items(),
                gckernels.EFSignSGD(),
                program=program,
                topology=topology,
                world_size=topology.world_size,
            )
            world = OneOfMany(RANK, topology, Places.of(torch.device("cpu")))
            repetitions = [seconds(plan, parameters, world) for _ in range(REPETITIONS)]
            checks, builds, counts = zip(*repetitions, strict=True)
            rows.append(
                {
                    "program": name,
                    "machines": topology.machines,
                    "devices": topology.devices,
                    "hidden": hidden,
                    "layers": LAYERS,
                    "units": len(plan.units),
                    "messages": counts[0],
                    "repetitions": REPETITIONS,
                    "check_s": f"{statistics.median(checks):.4f}",
                    "build_s": f"{statistics.median(builds):.4f}",
                    "build_least_s": f"{min(builds):.4f}",
                    "build_most_s": f"{max(builds):.4f}",
                }
            )
            print(rows[-1])
    print("wrote", merge_csv("build_time", torch.device("cpu"), rows, KEY))


if __name__ == "__main__":
    main()
