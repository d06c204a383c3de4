"""A fragment of a model that has been sent, and whose mean arrives some steps later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.futures import Future

from ...engine.failures import FailedBucket, Outcome
from .anchors import check_tensors
from .optimizer_states import copied


@dataclass
class Arrival:
    """A fragment on its way.

    Attributes:
        means: its updates, which become their means, by the names of the parameters.
        sent: the parameters as they were sent, if steps that are made meanwhile are to be kept; otherwise nothing.
        left: the number of steps until it arrives.
        futures: the messages that have not ended yet.
    """

    means: dict[str, torch.Tensor]
    sent: dict[str, torch.Tensor]
    left: int
    futures: Sequence[Future[Outcome]] = field(default=(), repr=False)

    def wait(self) -> None:
        """Wait until the means are there.

        Raises:
            RuntimeError: a message has failed.
        """
        futures, self.futures = self.futures, ()
        for future in futures:
            outcome = future.wait()
            if isinstance(outcome, FailedBucket):
                raise outcome.error

    def state_dict(self) -> dict[str, Any]:
        """Copies of the means and of the parameters that were sent, and the number of steps until they arrive."""
        self.wait()
        return {"means": copied(self.means), "sent": copied(self.sent), "left": self.left}

    @classmethod
    def read(cls, state: Any, parameters: Mapping[str, torch.Tensor]) -> Arrival:
        """The fragment of a state of :meth:`state_dict`, on the device of some parameters.

        Raises:
            ValueError: it is damaged, or of other parameters.
        """
        means = state.get("means") if isinstance(state, dict) else None
        if not isinstance(means, dict) or type(state.get("left")) is not int or not means.keys() <= parameters.keys():
            raise ValueError("state: arriving must be a dict with the means of parameters of the model")
        expected = {name: parameters[name] for name in means}
        check_tensors("means", means, expected)
        check_tensors("sent", state.get("sent"), expected if state["sent"] else {})
        own = {name: each.to(expected[name].device, copy=True) for name, each in means.items()}
        sent = {name: each.to(expected[name], copy=True) for name, each in state["sent"].items()}
        return cls(own, sent, state["left"])
