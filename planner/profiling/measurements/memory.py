"""Memory for measuring codecs: gradients like those of trainings, and buffers that no cache holds; copies in it.

Some codecs take a time that depends on the data: a selection of the largest entries, for example. All take another time
if their data is in a cache, where a training step leaves nothing of the last step's.

Copies between a device and its host have not been run: there was no GPU.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from gckernels import devices
from gckernels.devices import is_accelerator, memory_nbytes

from ...machines.curves import CopyCurve
from ...machines.machine import Shared
from ...machines.profile import WARNED_ERROR
from .fits import APART, curve_of, quietest, typical
from .session import Session, Stopwatch

SIZES = tuple(1 << shift for shift in range(16, 27))
_ROUNDS = 10  # the sizes take turns, so that other processes disturb few copies of each

_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_CONTAINER = Path("/sys/fs/cgroup/memory.max")
_DEFAULT_NBYTES = 32 << 20
_MAX_NBYTES = 512 << 20
_PATTERN = 1 << 20  # gradients repeat after this number of elements
_TENSOR = 1 << 14  # elements of one scale
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@functools.cache
def cache_nbytes(device: torch.device) -> int:
    """The size of the largest cache of a device; 32 MiB if it is not known."""
    if is_accelerator(device):
        return devices.cache_nbytes(device) or _DEFAULT_NBYTES
    sizes = [_DEFAULT_NBYTES // 32]
    for path in _CACHES.glob("index*/size"):
        try:
            text = path.read_text().strip()
            sizes.append(int(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else int(text))
        except (OSError, ValueError, IndexError):
            continue
    return max(sizes) if len(sizes) > 1 else _DEFAULT_NBYTES


def rank_nbytes(device: torch.device, ranks: int) -> int:
    """The bytes of memory of a rank.

    Args:
        ranks: the number of ranks on its host, which share the memory of the host.
    """
    if is_accelerator(device):
        return memory_nbytes(device)
    nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # "max", or no such file, where nothing limits the container
        nbytes = min(nbytes, int(_CONTAINER.read_text()))
    return nbytes // ranks


def far_nbytes(device: torch.device, caches: float) -> int:
    """The bytes after which a buffer is in no cache any more.

    Args:
        caches: how many times the size of its largest cache; this is limited where the cache is very large.
    """
    return min(int(caches * cache_nbytes(device)), _MAX_NBYTES)


def gradients(numel: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Numbers like those in the gradients of a training, ``fp32 [numel]``.

    Their distribution is Laplace's with heavier tails, and each stretch has another scale, like the tensors of a model.
    """
    generator = torch.Generator().manual_seed(seed)
    count = min(numel, _PATTERN)
    values = torch.empty(count, dtype=torch.float32, device="cpu").exponential_(generator=generator)
    values *= torch.empty_like(values).normal_(generator=generator).sign_()
    values *= torch.empty_like(values).normal_(generator=generator).mul_(0.5).exp_()  # the tails
    scales = values.new_empty(-(-count // _TENSOR)).normal_(generator=generator).mul_(1.5).exp_().mul_(1e-3)
    values *= scales.repeat_interleave(_TENSOR)[:count]
    return values.to(device).repeat(-(-numel // count))[:numel].contiguous()


class Arena:
    """Gradients, and room for results, each larger than all caches together.

    Args:
        least_numel: least number of elements of each.
        far_nbytes: bytes of each, at least.
    """

    def __init__(self, device: torch.device, least_numel: int, far_nbytes: int) -> None:
        self.device, self.numel = device, max(far_nbytes // 4, least_numel)
        self.grads = gradients(self.numel, device)
        self.outs = torch.ones_like(self.grads)  # zeros might all be one page of memory
        self._others = torch.ones(far_nbytes // 8, dtype=torch.float32, device=device)

    def starts(self, numel: int, most: int) -> list[int]:
        """Where buffers of ``numel`` elements begin, as far from each other as possible; at most ``most`` of them."""
        count = max(min(self.numel // numel, most), 1)
        return [index * (self.numel // count) // 16 * 16 for index in range(count)]

    def flush(self, whole: bool = True) -> None:
        """Fill the caches with other data, which must be written back before anything else finds room.

        So it is in a training step, whose backward writes the gradients of other parameters.

        Args:
            whole: whether to fill them for certain; a part suffices where the next buffers are in no cache anyway.
        """
        others = self._others if whole else self._others[: self._others.numel() // 4]
        others.add_(1.0)


# -------------------------------------------------------------------- copies


class CopyTimes:
    """The times of copies over a resource, at several moments; the same on all ranks. The slowest rank counts.

    Args:
        session: the measurement.
        arena: memory of the device.
        resource: ``TO_HOST`` or ``TO_DEVICE``, or the resource whose memory is copied.
    """

    def __init__(self, session: Session, arena: Arena, resource: Shared) -> None:
        self._session, self._arena, self._resource = session, arena, resource
        self._found: dict[int, list[list[tuple[float, float]]]] = {
            each: [] for each in SIZES if each <= arena.numel * 4
        }  # by size and moment

    def __str__(self) -> str:
        return f"copies, {self._resource.value}"

    @staticmethod
    def measured(session: Session, arena: Arena, resource: Shared) -> CopyTimes:
        """The times of copies, measured at a first moment. Collective."""
        found = CopyTimes(session, arena, resource)
        found._measure(list(found._found))
        return found

    def again(self) -> None:
        """Measure the disputed sizes at another moment. Collective."""
        self._measure(self.disputed)

    @property
    def disputed(self) -> list[int]:
        """The sizes of which no two moments agree, if the curve has a large error."""
        if (self.curve.error or 0.0) <= WARNED_ERROR:
            return []
        costs = {nbytes: quietest(nbytes, moments) for nbytes, moments in self._found.items()}
        return [nbytes for nbytes, cost in costs.items() if cost.apart is None or cost.apart > APART]

    @property
    def error(self) -> float | None:
        """The error of the curve."""
        return self.curve.error

    @property
    def curve(self) -> CopyCurve:
        """The curve."""
        points = [quietest(nbytes, moments) for nbytes, moments in self._found.items()]
        return CopyCurve(self._resource, curve_of(points))

    def _measure(self, sizes: Sequence[int]) -> None:
        """Measure copies of some sizes, which take turns."""
        self._arena.flush()
        rounds = [
            [_copy(self._session, self._arena, self._resource, each) for each in sizes] for _ in range(_ROUNDS + 1)
        ]
        for nbytes, copies in zip(sizes, zip(*rounds[1:], strict=True), strict=True):
            walls, cores = zip(*copies, strict=True)
            wall_s, cores_s = self._session.ranks.slowest([typical(walls), typical(cores)])
            self._found[nbytes].append([(wall_s, cores_s)])


def _copy(session: Session, arena: Arena, resource: Shared, nbytes: int) -> tuple[float, float]:
    """Seconds and CPU seconds of a copy of data that is in no cache."""
    count = nbytes // 4
    source, target = arena.grads[:count], arena.outs[-count:]
    if resource in (Shared.TO_HOST, Shared.TO_DEVICE):
        on_host = torch.empty(
            count, dtype=torch.float32, device="cpu", pin_memory=is_accelerator(session.places.device)
        )
        source, target = (source, on_host) if resource == Shared.TO_HOST else (on_host, target)
    arena.flush(whole=False)
    watch = Stopwatch(arena.device, session.clock)
    watch.mark()
    target.copy_(source, non_blocking=True)
    watch.mark()
    return watch.seconds()[-1], watch.cores_s()
