"""A simulated accelerator, on which tests of the synchronisation run without a card.

It does the work of streams in memory of the host, and finds accesses to memory without order, which are races on a real
device. See ``docs/design/simulated_device.md``.
"""

from __future__ import annotations

import sys


def install() -> None:
    """Make ``sim`` a device of this process, with the backend ``simccl`` and the host's codecs. It cannot be undone."""
    import torch
    import torch.distributed as dist

    from . import codecs, module
    from .collectives import SimulatedGroup

    torch._register_device_module("sim", module)
    sys.modules["torch.sim"] = module
    torch.utils.generate_methods_for_privateuse1_backend()  # type: ignore[attr-defined]

    def make(options, _):
        gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        return SimulatedGroup(gloo, options)

    dist.Backend.register_backend("simccl", make, extended_api=True, devices=["sim", "cpu"])
    codecs.install()


def be_late(seed: int, delay_us: int) -> None:
    """Let threads of the streams do their work late from now on, so that a race becomes a wrong number.

    Args:
        seed: draws the delays.
        delay_us: the longest delay in microseconds.
    """
    from .module import compiled

    compiled.be_late(seed, delay_us)


def end_of_call() -> tuple[list[str], list[str]]:
    """Wait for all devices, and return the races and the communicators of the collectives since the last call of this
    function."""
    from . import module
    from .collectives import issued

    for device in range(module.device_count()):
        module.synchronize(device)
    races: list[str] = module.compiled.races()
    module.compiled.forget_races()
    found = list(issued)
    issued.clear()
    return races, found
