"""How long a large job takes to check a plan and to build its messages, on one core.

    python bench/build_time.py

A transformer of 100 layers, 1200 parameters, as one of the ranks of a synchronizer has it, for every program and
number of ranks. Nothing is sent and no process group is made. Every repetition begins with nothing remembered from the
one before. Reported are medians of the processor's time, in seconds: ``check_s`` is the plan's check, ``build_s`` all
from there to messages that can be submitted, with the memory for gradients, residuals and buffers. Where layers are
narrow that is next to nothing, and what is left is Python's own time.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import types
from collections.abc import Iterator, Mapping
from unittest import mock

import torch
import torch.distributed as dist
from record import merge_csv

import gckernels
from gckernels import sync
from gckernels.sync import program as programs
from gckernels.sync import runtime
from gckernels.sync.buckets import make_buckets
from gckernels.sync.message import Message
from gckernels.sync.nobody import Nobody
from gckernels.sync.places import Places

LAYERS, HIDDEN = 100, (32, 256)
BUCKET_CAP_MB = 25
REPETITIONS = 7
RANK = 1
SETTINGS = (
    ("allgather", sync.ALLGATHER, sync.Topology(8)),
    ("alltoall", sync.ALLTOALL, sync.Topology(1024)),
    ("hierarchical", sync.HIERARCHICAL, sync.Topology(128, 8)),
    ("parameter_server", sync.PARAMETER_SERVER, sync.Topology(1024)),
    ("ring", sync.ring(8), sync.Topology(8)),
)
KEY = ("program", "machines", "devices", "hidden")


def transformer(layers: int, hidden: int, device: torch.device | str) -> dict[str, torch.nn.Parameter]:
    """Its parameters by name, twelve for each layer."""
    encoder = [torch.nn.TransformerEncoderLayer(hidden, 8, 4 * hidden, device=device) for _ in range(layers)]
    return dict(torch.nn.ModuleList(encoder).named_parameters())


@contextlib.contextmanager
def alone(communicators: Nobody) -> Iterator[None]:
    """Inside, a runtime is that of one rank of many, and the others need not be there."""
    with contextlib.ExitStack() as stack:
        for name in ("rank", "world_size"):
            stack.enter_context(
                mock.patch.object(dist, f"get_{name}", lambda _, name=name: getattr(communicators, name))
            )
        stack.enter_context(mock.patch.object(runtime, "Communicators", lambda *_: communicators))
        engine = types.SimpleNamespace(communicators=communicators)
        stack.enter_context(mock.patch.object(runtime, "Engine", lambda *_: engine))
        yield


def built(
    plan: sync.Plan, parameters: Mapping[str, torch.nn.Parameter], communicators: Nobody, bucket_cap_mb: float
) -> list[Message]:
    """The messages of a synchronizer, in the order in which they are launched."""
    device = next(iter(parameters.values())).device
    messages: list[Message] = []
    with alone(communicators):
        executed = runtime.Runtime(plan, None, device, seed=0, start_step=0, keep_unused=False)
        for bucket in make_buckets(plan, parameters, bucket_cap_mb * 2**20):
            messages += executed.messages(bucket.vector, bucket.units, shares=True)
    return messages


def seconds(plan: sync.Plan, parameters: Mapping[str, torch.nn.Parameter], world: Nobody) -> tuple[float, float, int]:
    """Of the check and of the building, and how many messages there are."""
    programs._trace.cache_clear()
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
                parameters.items(), gckernels.EFSignSGD(), topology.world_size, program, topology=topology
            )
            world = Nobody(RANK, topology, Places.of(torch.device("cpu")))
            found = [seconds(plan, parameters, world) for _ in range(REPETITIONS)]
            checks, builds, counts = zip(*found, strict=True)
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
