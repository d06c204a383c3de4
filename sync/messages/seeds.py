"""The seeds of stochastic compressors: one for every unit and encoding, to which every training step adds a number."""

from __future__ import annotations

import hashlib

import torch

from gckernels.codec import SEED_MASK
from gckernels.devices import current_stream, is_accelerator, is_capturing

from ..programs.steps import Place
from ..resources.memory_spaces import Places

_STRIDE = 0x9E3779B97F4A7C15 - 2**64  # odd: seeds of different steps of a unit differ; as an int64
_STEPS_OF = pow(_STRIDE, -1, SEED_MASK + 1)  # times _STRIDE this is 1, modulo 2**63


def unit_seed(*names: object) -> int:
    """A seed of 64 bits, derived from the texts of ``names``; the same in a resumed process."""
    text = "/".join(map(str, names))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def step_seed(seed: int, step: int) -> int:
    """The seed of a unit in a training step."""
    return (seed + step * _STRIDE) & SEED_MASK


class Seeds:
    """The seeds of a job on one rank.

    The number that a step adds lies in memory. So the work of a step is the same as that of the step before, and a CUDA
    graph of it draws new random numbers in every replay if it begins with :meth:`begin` of the following step.

    Args:
        seed: the seed of the job.
        places: the memories of the rank.

    Attributes:
        step: the number of the current step.
    """

    def __init__(self, seed: int, places: Places) -> None:
        self.step = 0
        self._seed, self._places = seed, places
        self._begun_on: torch.Stream | None = None
        self._added = {
            place: torch.zeros(1, dtype=torch.int64, device=places.memory(place))
            for place in {places.actual(place) for place in Place}
        }

    def of(self, *names: object) -> int:
        """The seed, without the number of the step, of the encoding that ``names`` describe."""
        return unit_seed(self._seed, *names)

    def added(self, place: Place = Place.DEVICE) -> torch.Tensor:
        """The memory at ``place``, ``int64 [1]``, with the number that the current step adds, modulo 2**63."""
        return self._added[self._places.actual(place)]

    def begin(self, step: int) -> None:
        """Go to a step, behind the work on the current stream of a device; all steps before must be done on the host.

        The step that follows the last one is reached by an addition, any other one by storing its number.
        """
        if is_accelerator(device := self.added().device):
            self._follow(current_stream(device), is_capturing(device))
        for added in self._added.values():
            if step == self.step + 1:
                added.add_(_STRIDE)
            else:
                added.fill_(step_seed(0, step))
        self.step = step

    def _follow(self, here: torch.Stream, captures: bool) -> None:
        """Let a stream follow the one on which the last step has begun, which has awaited that step.

        Roots of FSDP2 have streams of their own, and may be told to wait for nothing between two backwards. The capture
        of a graph begins behind all work of the device.
        """
        last, self._begun_on = self._begun_on, here
        if last is not None and last != here and not captures:
            here.wait_stream(last)

    def replayed(self) -> int:
        """The number of steps that CUDA graphs have taken, more than the host knows of; waits for the current stream.

        It is -1 from the capture of a step, which the host counts, to the first replay.
        """
        behind = (int(self.added()) * _STEPS_OF - self.step) & SEED_MASK
        return behind if behind <= SEED_MASK // 2 else behind - SEED_MASK - 1
