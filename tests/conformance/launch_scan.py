"""Lower every launch of every configuration to Triton's GPU IR, in many sizes, and print the failures as JSON.

    python launch_scan.py [--quick]

With ``--quick`` one launch of every kernel is lowered, for one element unless only large units take it. Kernels of
sparsifiers are lowered as parts of those of many units, which call them.

Triton compiles a kernel anew for every combination of properties of its arguments: a count of 1 becomes a constant, and
a size divisible by 16 is known to be divisible. Triton's interpreter does not do this, so a kernel that fails to
compile in some size still passes every interpreted test. This is a script, because lowering needs a process without
``TRITON_INTERPRET``, and so that another release of Triton can be put on ``PYTHONPATH``.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator

import torch
import triton

from gckernels.testing.configurations import CONFIGURATIONS, DEFAULTS
from gckernels.toolkit.kernels.launch import Launch
from harness.machine_code.aot import lower_launch, specialize
from harness.machine_code.launches import (
    call_of_large,
    calls_of_many,
    calls_of_one,
    calls_with_encoded_residuals,
    has_batches,
    launches_of_powersgd,
    waits,
)

CAPABILITY = 90
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SOURCES = (1, 2, 16)
SHAPES = *((numel, 1) for numel in (0, 1, 9, 1023, 1500, 100_003, 2**20, 2**21)), (5000, 4)  # elements, chunks
RANKS = (1, 4, 32)
MATRICES = ((1, 1), (3, 5), (100, 300))  # rows, columns

CLIPPED = "DGC(ratio=0.05, momentum=0.5, nesterov=True, clip=10.0, workers=4, value_bits=4)"
ONE = ((1, 1),)
QUICK = dict.fromkeys(("BlockQuant", "Cast16", "ChunkTopK", "RandomK"), ONE) | {
    "EFSignSGD(block=None)": (*ONE, (2**20, 1)),
    CLIPPED: (*ONE, (2**21, 1)),
}
"""Configurations and shapes that together use all kernels."""

MAY_BE_CONSTANT = {
    "added_ptr": "nothing is added to seeds where none are used",
    "numel": "multiples of 16 make accesses wide, and some sizes are 1",
    "num_sources": "decoding one source takes no loop",
}
"""Arguments that may become constants if they are 1, with the reason. For other arguments this would only mean one more
kernel to compile and to test."""


def launches(quick: bool) -> Iterator[tuple[str, Launch]]:
    """Yield every launch with a description of its origin; most launches share a kernel with others."""
    for spec in QUICK if quick else CONFIGURATIONS:
        # dtypes are independent of the number of sources, and nearly independent of the configuration
        given = [(torch.float32, sources) for sources in SOURCES]
        given += [(dtype, 1) for dtype in DTYPES[1:] if spec in DEFAULTS]
        for numel, chunks in QUICK[spec] if quick else SHAPES:
            for dtype, sources in given[:1] if quick else given:
                yield from _launches_of(spec, dtype, numel, chunks, sources)
    for rank in RANKS[:1] if quick else RANKS:
        for rows, cols in MATRICES[:1] if quick else MATRICES:
            for dtype in DTYPES[:1] if quick else DTYPES:
                for launch in launches_of_powersgd(dtype, rows, cols, rank):
                    yield f"PowerSGD, {dtype}, {rows} x {cols}, rank {rank}", launch


def _launches_of(spec: str, dtype: torch.dtype, *shape: int) -> Iterator[tuple[str, Launch]]:
    compressor = CONFIGURATIONS[spec]
    calls = calls_of_one(compressor, dtype, *shape, accumulate=False)
    calls += calls_of_one(compressor, dtype, *shape, accumulate=True)[-1:]
    calls += calls_with_encoded_residuals(compressor, dtype, *shape)
    if has_batches(compressor):
        calls += calls_of_many(compressor, dtype, *shape)
    if compressor.traits.stochastic:
        calls.append(call_of_large(compressor, dtype, *shape))
    where = f"{spec}, {dtype}, {shape[0]} elements in {shape[1]} chunks, {shape[2]} sources"
    for call, _, recorded in calls:
        for launch in recorded:
            yield f"{where}, {call}", launch


def constants(launch: Launch) -> set[str]:
    """The names of arguments that Triton has made constants although they are not declared as such."""
    _, constexprs, _ = specialize(launch, CAPABILITY)
    return {launch.kernel.arg_names[path[0]] for path in constexprs} - launch.constexprs.keys() - MAY_BE_CONSTANT.keys()


def lower(number: int) -> str | None:
    """The error of a kernel, or None."""
    where, launch = _kernels[number]
    wrong = None
    try:
        barriers = "barrier" in lower_launch(launch, CAPABILITY)  # in this IR only those of the kernel's text
        if barriers and waits(launch) is None:
            wrong = "has barriers, but its constants do not say whether they wait"
    except Exception as error:
        wrong = f"{type(error).__name__}: {str(error).splitlines()[-1]}"
    return wrong and f"{where}: {launch.name}: {wrong}"


_kernels: list[tuple[str, Launch]] = []  # lowered by forked processes, so it is global


def main() -> None:
    quick = "--quick" in sys.argv[1:]
    different = {}
    for where, launch in launches(quick):
        key = launch.kernel, str(specialize(launch, CAPABILITY)), str(launch.options_for("cuda"))
        different.setdefault(key, (where, launch))
    named = [(where, launch.name, sorted(constants(launch))) for where, launch in different.values()]
    # if few, the last launch of every kernel, which for most of them has a residual or accumulates
    lowered = {
        (launch.kernel, launch.name) if quick else key: (where, launch) for key, (where, launch) in different.items()
    }
    shared = {launch.constexprs["A"].run for _, launch in lowered.values() if "A" in launch.constexprs}
    _kernels[:] = (each for each in lowered.values() if not quick or each[1].kernel not in shared)
    with multiprocessing.get_context("fork").Pool() as pool:
        failures = [failure for failure in pool.imap_unordered(lower, range(len(_kernels)), 4) if failure]
    found = {
        "triton": triton.__version__,
        "kernels": len(_kernels),
        "functions": sorted({f"{launch.kernel.__module__}.{launch.kernel.__name__}" for _, launch in lowered.values()}),
        "constants": [f"{where}: {kernel}: {', '.join(names)}" for where, kernel, names in named if names],
        "failures": sorted(failures),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
