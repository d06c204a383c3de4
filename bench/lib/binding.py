"""Ranks on cores of their own."""

from __future__ import annotations

import os

import torch.distributed as dist


def keep_to_own_cores() -> None:
    """Let this rank run on its part of the cores, which a machine of its own would have. With more ranks than cores,
    each rank keeps to one of them.

    Linux often lets two ranks that wait for each other run on one core for seconds, while another one is idle.
    """
    cores, rank, ranks = sorted(os.sched_getaffinity(0)), dist.get_rank(), dist.get_world_size()
    first, last = (len(cores) * each // ranks for each in (rank, rank + 1))
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores[first : max(last, first + 1)])
