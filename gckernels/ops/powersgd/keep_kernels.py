"""The kernels of PowerSGD that keep factors for the next step (``reference.keep``).

One launch finds out what the parts of all means contain, another copies them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ...toolkit.kernels.launch import launch, temporary
from ...toolkit.kernels.launch_batch import bind_launcher
from ...toolkit.numeric import is_finite
from .tables import on_device

BLOCK = 2048  # elements of a part


@triton.jit
def _inspect_kernel(table_ptr, work_ptr, found_ptr, BLOCK: tl.constexpr):
    """Find out for each part whether it is used (1), and whether it has a number that is not finite (2)."""
    work = work_ptr + tl.program_id(0) * 2  # matrix, first element
    row = table_ptr + tl.load(work) * 5  # mean, factor, numel, parts, number of the first part
    mean_ptr, numel = tl.load(row).to(tl.pointer_type(tl.float32)), tl.load(row + 2)
    offsets = tl.load(work + 1) + tl.arange(0, BLOCK)
    values = tl.load(mean_ptr + offsets, mask=offsets < numel, other=0.0)
    used, wrong = tl.where(values == 0.0, 0, 1), tl.where(is_finite(values), 0, 2)
    tl.store(found_ptr + tl.program_id(0), tl.max(used, 0) + tl.max(wrong, 0))


@triton.jit
def _keep_kernel(table_ptr, work_ptr, found_ptr, HAS_FACTOR: tl.constexpr, BLOCK: tl.constexpr):
    work = work_ptr + tl.program_id(0) * 2
    row = table_ptr + tl.load(work) * 5
    mean_ptr, factor_ptr = (
        tl.load(row).to(tl.pointer_type(tl.float32)),
        tl.load(row + 1).to(tl.pointer_type(tl.float32)),
    )
    numel, parts, first_part = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    found = tl.zeros((128,), tl.int32)
    for first in range(0, parts, 128):
        part = first + tl.arange(0, 128)
        found |= tl.load(found_ptr + first_part + part, mask=part < parts, other=0)
    wrong, used = tl.max(found & 2, 0) > 0, tl.max(found & 1, 0) > 0
    offsets = tl.load(work + 1) + tl.arange(0, BLOCK)
    if wrong:
        tl.store(mean_ptr + offsets, tl.full((BLOCK,), float("nan"), tl.float32), mask=offsets < numel)
    elif used & HAS_FACTOR:
        values = tl.load(mean_ptr + offsets, mask=offsets < numel, other=0.0)
        tl.store(factor_ptr + offsets, values, mask=offsets < numel)


def keep(means, factors) -> None:
    rows: list[tuple[int, ...]] = []
    parts: list[tuple[int, ...]] = []
    for index, mean in enumerate(means):
        address = factors[index].data_ptr() if factors else 0
        rows.append((mean.data_ptr(), address, mean.numel(), triton.cdiv(mean.numel(), BLOCK), len(parts)))
        parts += [(index, first) for first in range(0, mean.numel(), BLOCK)]
    table, work = (on_device(tuple(each), means[0].device) for each in (rows, parts))
    found = temporary(len(parts), dtype=torch.int32, device=means[0].device)
    launch(_inspect_kernel, (len(parts),), table, work, found, BLOCK=BLOCK)
    launch(_keep_kernel, (len(parts),), table, work, found, HAS_FACTOR=bool(factors), BLOCK=BLOCK)


def bind_keep(means, factors) -> Callable[[], None]:
    return bind_launcher(functools.partial(keep, means, factors), means[0].device)
