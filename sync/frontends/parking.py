"""The gradient that plans leave behind when others follow them, until its parameters are used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from ..plans.plan import UnitPlan
from ..plans.strides import in_reals
from ..states.jobs import Job
from .frontend import FrontendProtocol
from .listeners import Listeners
from .parked import Parked
from .request import Request


class Parking:
    """Gradient that no plan has sent is added to the next gradient of its parameter.

    Args:
        frontend: delivers it.
        request: the settings of the attachment.
        listeners: called at the ends of steps.
    """

    def __init__(self, frontend: FrontendProtocol, request: Request, listeners: Listeners) -> None:
        self._frontend, self._request, self._listeners = frontend, request, listeners
        self._parked: Parked | None = None  # made when something is parked for the first time

    def park(self, units: Sequence[UnitPlan]) -> None:
        """Keep what the residuals of some units hold until their parameters are used. The units are the same on all
        ranks."""
        named, parameters = {name for unit in units for name in unit.parameters}, self._frontend.parameters()
        sizes = {name: in_reals(parameters[name]).numel() for name in sorted(named & parameters.keys())}
        whole = [unit for unit in units if sizes.keys() >= {*unit.parameters}]  # others have lost a parameter
        self._made().park(self._frontend.runtime.unsent(whole, sizes), sizes)
        self._frontend.deliver_to(sizes)

    def deliver(self, name: str, parameter: torch.Tensor) -> None:
        """Add what is parked of a parameter to its gradient, which has just been accumulated, if that will be averaged
        and used."""
        frontend = self._frontend
        if self._parked is not None and frontend.averages_now and not frontend.runtime.averages_only:
            self._parked.deliver(name, parameter)

    def may_return(self) -> bool:
        """Whether this rank would hold more if the last step did not count."""
        return self._parked is not None and self._parked.may_return()

    def discard_step(self) -> bool:
        """Let the last step not count, and return whether something of it is lost."""
        return self._parked is not None and self._parked.discard_step()

    def nbytes(self) -> int:
        """Bytes of all parts and of their copies on this rank."""
        return 0 if self._parked is None else self._parked.nbytes()

    def state_dict(self, device: torch.device | None = None) -> dict[str, torch.Tensor]:
        """The parts of this rank, as of :meth:`~.parked.Parked.state_dict`."""
        return {} if self._parked is None else self._parked.state_dict(device)

    @property
    def sizes(self) -> Mapping[str, int]:
        """The number of elements of every parameter of which some rank has a part; the same on all ranks."""
        return {} if self._parked is None else self._parked.sizes

    def read(self, job: Job) -> Callable[[], None]:
        """A function that continues from what a saved job has parked.

        Raises:
            ValueError: something is parked of no parameter.
        """
        parameters = self._frontend.parameters()
        for name, numel in job.parked_sizes.items():
            if name not in parameters or in_reals(parameters[name]).numel() != numel:
                raise ValueError(f"state: parked: the model has no parameter {name} with {numel:,} elements")

        def take() -> None:
            if job.parked_sizes or self._parked is not None:
                runtime = self._frontend.runtime
                self._made().load_state_dict(job.parked_part(runtime.rank, runtime.world_size), job.parked_sizes)
                self._frontend.deliver_to(job.parked_sizes)

        return take

    def close(self) -> None:
        """Keep nothing any more, because synchronisation ends."""
        if self._parked is not None:
            self._parked.close()
            self._parked = None

    def _made(self) -> Parked:
        """The place of what plans leave behind, made at the first call."""
        if self._parked is None:
            scaler, device = self._request.enabled_scaler, self._frontend.device
            self._parked = Parked(self._frontend.parameters(), device, scaler, self._request.can_discard)
            self._listeners.add(self._parked.end_step)
        return self._parked
