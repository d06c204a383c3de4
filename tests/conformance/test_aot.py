"""Many launches are compiled ahead of time: each kernel once, and not again until something changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from processes import output_of

KERNELS = """
import triton
import triton.language as tl

@triton.jit
def value():
    return {value}

@triton.jit
def fill_kernel(out_ptr, COUNT: tl.constexpr):
    offsets = tl.arange(0, COUNT)
    tl.store(out_ptr + offsets, tl.zeros((COUNT,), tl.float32) + value())
"""
COMPILE = """
import importlib, json, sys, torch
from pathlib import Path
from harness.machine_code import aot
from gckernels.toolkit.kernels.launch import launch, record_launches

steps, text, folder = json.loads(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
out, read, read_text, found = torch.zeros(256), aot._read, aot._reader, []

def noting(*args):
    with open(folder / "noted", "a") as file:  # in another process
        file.write("read ")
    return read(*args)

aot._read = noting
for number, (value, counts, num_warps, reader) in enumerate(steps):
    (folder / "noted").write_text("")
    (folder / f"kernels_{number}.py").write_text(text.format(value=value))
    importlib.invalidate_caches()
    kernel = importlib.import_module(f"kernels_{number}").fill_kernel
    aot._reader = (lambda: reader) if reader else read_text
    with record_launches() as recorded:
        for count in counts:
            launch(kernel, (1,), out, num_warps=num_warps, COUNT=count)
    stores = [each.count("out_ptr", "store") for each in aot.compile_launches([(each, 90) for each in recorded])]
    found.append([stores, len((folder / "noted").read_text().split())])
json.dump(found, sys.stdout)
"""


def compiled(folder: Path, steps: list[tuple[float, list[int], int, str]]) -> list[tuple[list[int], int]]:
    """For every step, ``(value, counts, num_warps, reader)``: the number of stores of each launch's kernel, and the
    number of kernels whose facts were not in the cache, which is empty at first."""
    arguments = ("-c", COMPILE, json.dumps(steps), KERNELS, folder)
    script = output_of(*arguments, paths=[folder], TRITON_CACHE_DIR=str(folder / "cache"))
    return [(stores, read) for stores, read in json.loads(script)]


@pytest.mark.slow
def test_a_kernel_is_compiled_once_and_anew_when_something_changes(tmp_path):
    counts, one = [64, 256, 64], [64]
    first, again, in_what_is_called, options, arguments, reader, as_before = compiled(
        tmp_path,
        [
            (1.0, counts, 1, ""),
            (1.0, counts, 1, ""),
            (2.0, one, 1, ""),
            (1.0, one, 2, ""),
            (1.0, [128], 1, ""),
            (1.0, one, 1, "another text of the module that reads"),
            (1.0, counts, 1, ""),
        ],
    )
    assert first == ([1, 2, 1], 2)  # stores of at most 16 bytes by 32 threads
    assert again == as_before == (first[0], 0)
    assert in_what_is_called == reader == ([1], 1)
    assert options[1] == arguments[1] == 1
