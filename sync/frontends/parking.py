"""The gradient that a plan leaves behind when another one follows, as an attachment or a synchronizer keeps it."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch.utils.hooks import RemovableHandle

from ..plans.plan import UnitPlan
from ..plans.strides import in_reals
from ..states.jobs import Job
from .changes import Changeable
from .checks.models import on_accumulated
from .parked import Parked


class Parking(Changeable):
    """Gradient that no plan has sent is added to the next gradient of its parameter."""

    _parked_hooks: Mapping[str, RemovableHandle] = MappingProxyType({})

    def _park(self, units: Sequence[UnitPlan]) -> None:
        named, parameters = {name for unit in units for name in unit.parameters}, self.parameters()
        sizes = {name: in_reals(parameters[name]).numel() for name in sorted(named & parameters.keys())}
        whole = [unit for unit in units if sizes.keys() >= {*unit.parameters}]  # others have lost a parameter
        self._parking().park(self._runtime.unsent(whole, sizes), sizes)
        self._watch_parked(sizes)

    def _parking(self) -> Parked:
        """The place of what plans leave behind, made at the first call."""
        if self._parked is None:
            scaler, runtime = self._request.enabled_scaler, self._runtime
            self._parked = Parked(self.parameters(), runtime.device, scaler, self._request.can_discard)
            self.on_step_end(self._parked.end_step)
        return self._parked

    def _deliver(self, name: str, parameter: torch.Tensor) -> None:
        """Add what is parked of a parameter to its gradient, which has just been accumulated, if that will be averaged
        and used."""
        if self._parked is not None and self._averages_now and not self._runtime.averages_only:
            self._parked.deliver(name, parameter)

    def _read_parked(self, job: Job) -> Callable[[], None]:
        """A function that continues from what a saved job has parked.

        Raises:
            ValueError: something is parked of no parameter.
        """
        parameters = self.parameters()
        for name, numel in job.parked_sizes.items():
            if name not in parameters or in_reals(parameters[name]).numel() != numel:
                raise ValueError(f"state: parked: the model has no parameter {name} with {numel:,} elements")

        def take() -> None:
            if job.parked_sizes or self._parked is not None:
                runtime = self._runtime
                self._parking().load_state_dict(job.parked_part(runtime.rank, runtime.world_size), job.parked_sizes)
                self._watch_parked(job.parked_sizes)

        return take

    def _leave_parked(self) -> None:
        """Keep nothing any more, because synchronisation ends."""
        if self._parked is not None:
            self._parked.close()
            self._parked = None
        for hook in self._parked_hooks.values():
            hook.remove()

    @abstractmethod
    def on_step_end(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` at the end of each synchronising backward."""

    def _watch_parked(self, names: Iterable[str]) -> None:
        """Call :meth:`_deliver` for some parameters when they have their gradients, which DDP takes later."""
        parameters, weak = self.parameters(), weakref.ref(self)
        for name in names:
            if name not in self._parked_hooks:
                hook = on_accumulated(parameters[name], _deliverer(weak, name))
                self._parked_hooks = {**self._parked_hooks, name: hook}

    @property
    @abstractmethod
    def _averages_now(self) -> bool:
        """Whether a backward averages gradients, and does not only accumulate them."""


def _deliverer(weak: weakref.ref[Parking], name: str) -> Callable[[torch.Tensor], None]:
    """The hook of a parameter. It refers to nothing that refers to the parameter."""

    def hook(parameter: torch.Tensor) -> None:
        if (parking := weak()) is not None:
            parking._deliver(name, parameter)

    return hook
