"""Ranks on the simulated device: tensors without a device are there, and every call is checked for races."""

from __future__ import annotations

import io
import pickle
from dataclasses import replace
from typing import Any

from ranks import Device, Outcome

_SHOWN = 8
_DELAY_US = 300


def use(device: Device) -> None:
    """Make this rank's tensors those of the simulated device, from now on."""
    import torch

    from harness import simulated_device

    if torch.get_default_device().type != "sim":
        simulated_device.install()
        torch.set_default_device("sim")
    if device.seed is not None:
        simulated_device.be_late(device.seed, _DELAY_US)


def checked(outcome: Outcome) -> Outcome:
    """The outcome of a call, with tensors of the CPU; an error if there were races in it."""
    from harness import simulated_device

    races, issued = simulated_device.end_of_call()
    if races:
        different = list(dict.fromkeys(races))
        shown = "\n".join(different[:_SHOWN])
        return Outcome(error_type="Races", error_text=f"{len(races)} races, {len(different)} different ones:\n{shown}")
    buffer = io.BytesIO()
    _Pickler(buffer).dump(outcome.value)
    return replace(outcome, value=pickle.loads(buffer.getvalue()), issued=issued)


class _Pickler(pickle.Pickler):
    """Pickles tensors as those of the CPU."""

    def reducer_override(self, value: Any) -> Any:
        import torch

        if isinstance(value, torch.Tensor) and value.device.type == "sim":
            return value.detach().cpu().requires_grad_(value.requires_grad).__reduce_ex__(2)
        if isinstance(value, torch.device) and value.type == "sim":
            return torch.device, ("cpu",)
        return NotImplemented
