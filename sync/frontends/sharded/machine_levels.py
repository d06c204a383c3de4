"""Ranks of a model of FSDP2 that are in machines with several devices each."""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...communication.collectives import reduce_scatter
from ...communication.groups import group_of
from ...programs.steps import Level
from ...programs.topology import Topology


class MachineLevels:
    """The machine and the device of a rank. Construction is collective.

    Gradients are added up inside a machine first, as they are, so that each device has a part of the rows of all ranks:
    those of the ranks in the same place of every machine. Only these ranks then send them to one another.

    Args:
        topology: the machines and their devices, in the order of the ranks.
        group: all ranks.

    Attributes:
        topology: as given.
        device: the number of the device in its machine.
        between: the ranks in the same place of all machines.
    """

    def __init__(self, topology: Topology, group: dist.ProcessGroup) -> None:
        # as groups have their ranks in order, so must the mesh
        ranks, index = dist.get_process_group_ranks(group), dist.get_rank(group)
        self.topology, self.device = topology, topology.index(Level.INTRA, index)
        self.between, self._inside = (
            group_of([ranks[each] for each in next(found for found in topology.groups(level) if index in found)])
            for level in (Level.INTER, Level.INTRA)
        )

    def own_rows(self, vector: torch.Tensor) -> torch.Tensor:
        """The rows of the ranks in the place of this rank, ``[machines, numel]``, in the rows of all ranks."""
        return vector.view(self.topology.machines, self.topology.devices, -1)[:, self.device]

    def reduce(self, vector: torch.Tensor) -> torch.Tensor:
        """The mean of the :meth:`own_rows` of all devices of the machine, at the begin of ``vector``."""
        machines, devices = self.topology.machines, self.topology.devices
        by_device = vector.view(machines, devices, -1).transpose(0, 1).contiguous()
        rows = vector[: by_device[0].numel()]
        reduce_scatter(rows, by_device.view(-1), group=self._inside)
        return rows.mul_(1.0 / devices).view(machines, -1)

    def numel(self, whole: int, row: int) -> int:
        """The number of elements of a parameter that are in :meth:`own_rows`.

        Args:
            whole: the number of its elements.
            row: the elements that it takes in each row.
        """
        first = (self.device + machine * self.topology.devices for machine in range(self.topology.machines))
        return sum(min(max(whole - index * row, 0), row) for index in first)
