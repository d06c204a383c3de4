"""Every kernel of every configuration compiles for GPUs that this machine lacks. It spills no registers, accesses
gradients, residuals and outputs 16 bytes at a time, and is no worse than its row in ``bench/results/kernels.csv``."""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
import triton
from configurations import CONFIGURATIONS, ONE_OF_EACH_KIND, for_each

from gckernels import chunk_numel
from gckernels.codec import Decoding, Encoding
from gckernels.toolkit.kernels.launch import record_launches
from gckernels.toolkit.quantizer import MapQuantizer
from harness.machine_code.aot import TARGETS
from harness.machine_code.kernel_table import made_with, read_table, regressions, rows
from harness.machine_code.launches import collect, has_batches, has_recode, is_variation

TABLE = Path(__file__).parents[2] / "bench" / "results" / "kernels.csv"

# The number of narrow accesses to a gradient, residual or output that a kernel may contain, and the reason, by the name
# of the configuration or its beginning.
NARROW = {
    "ChunkTopK": (99, "candidates and entries are read, and the residuals of entries written, one by one"),
    "RandomK": (99, "the entries are read, and their residuals written, one by one"),
    **dict.fromkeys(
        ("DGC", "GradDrop", "MSTopK", "Threshold", "TopK"),
        (99, "samples and candidates are read, and the residuals of candidates written, one by one"),
    ),
}


def allowed_narrow(spec: str) -> int:
    """The number of narrow loads, and of narrow stores, that the configuration may have per tensor."""
    return next((count for prefix, (count, _) in NARROW.items() if spec.startswith(prefix)), 0)


def problems(record: dict) -> list[str]:
    """Descriptions of the problems of a compiled launch."""
    found = []
    if record["stack_nbytes"] or record["local_loads"] or record["local_stores"]:
        found.append(
            f"spills: a stack of {record['stack_nbytes']} bytes, {record['local_loads']} loads and "
            f"{record['local_stores']} stores, with {record['registers']} registers"
        )
    if record["call"] in SINGLE:  # the accessed tensor is unknown; these kernels are compared with others below
        return found
    for tensor, names in record["tensors"].items():
        for kind in ("load", "store"):
            through = [each for each in record["accesses"] if each["kind"] == kind and each["argument"] in names]
            wide = sum(each["count"] for each in through if each["nbytes"] >= 16)
            narrow = sum(each["count"] for each in through if each["nbytes"] < 16)
            # For an odd number of elements the last tile has a narrow path, besides the wide one of other tiles: 16
            # bytes are at most 8 elements.
            allowed = allowed_narrow(record["spec"]) + (8 * wide if record["variant"] == "odd" else 0)
            if narrow > allowed:
                found.append(f"{kind}s {tensor} with {narrow} accesses of less than 16 bytes ({wide} of 16)")
    return found


SINGLE = {"encode many": "encode with feedback", "decode many": "decode", "recode many": "recode"}
"""The call of a single unit that corresponds to each call of many units."""
ONE_NUMBER = ("units_ptr", "table_ptr", "added_ptr")


def accesses(record: dict, kind: str) -> tuple[int, int]:
    """The number of wide accesses (16 bytes) and of narrow ones of a kind, except for reads of single numbers."""
    found = [each for each in record["accesses"] if each["kind"] == kind and each["argument"] not in ONE_NUMBER]
    wide = sum(each["count"] for each in found if each["nbytes"] >= 16)
    return wide, sum(each["count"] for each in found) - wide


# Every call reads or writes these. A test that finds no access to one of them has looked in the wrong place.
EXPECTED = {
    "encode": {("grad", "load")},
    "encode with feedback": {("grad", "load"), ("residual", "load"), ("residual", "store")},
    "decode": {("out", "store")},
    "recode": {("residual", "load"), ("residual", "store")},
    "encode many": {("units", "load"), ("units", "store")},
    "decode many": {("units", "load"), ("units", "store")},
    "recode many": {("units", "load"), ("units", "store")},
}


QUICK = {spec: ONE_OF_EACH_KIND[spec] for spec in ("Cast16", "LinearQuant", "RandomK")}
"""Configurations whose kernels compile in seconds. Launches of all others are lowered to Triton's GPU IR, see
``test_launch_scan.py``."""
WORK = [
    ("quick", (90,), QUICK, {"LinearQuant": QUICK["LinearQuant"]}),
    *((f"sm_{target}", (target,), CONFIGURATIONS, CONFIGURATIONS) for target in TARGETS),
]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(each[1:], id=each[0], marks=[pytest.mark.slow] if index else []) for index, each in enumerate(WORK)
    ],
)
def found(request, tmp_path_factory) -> dict:
    """The compiled kernels: those of a few configurations for one GPU, or of all configurations for each GPU.
    They are compiled once for all tests of this file, even if the tests run in several processes."""
    targets, configurations, varied = request.param
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder
    file = folder / f"kernels-{request.param_index}.json"
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not file.exists():
            file.write_text(json.dumps(collect(targets, configurations, varied)))
    asked = {"targets": targets, "configurations": configurations, "varied": varied}
    return json.loads(file.read_text()) | asked


def with_batches(found: dict) -> set[str]:
    """The configurations of which launches of many units are compiled."""
    return {spec for spec, each in found["varied"].items() if has_batches(each)}


@pytest.mark.timeout(600)
def test_kernels_compile_without_spills_and_with_wide_accesses(found):
    """All problems, of whichever configuration, are listed together at the end."""
    records = found["compiled"]

    wrong = [
        f"{record['spec']} {record['call']} {record['variant']}, {record['kernel']}, sm_{record['capability']}: {what}"
        for record in records
        for what in problems(record)
    ]
    assert not wrong, "\n".join(wrong)

    several = {spec: count for spec, count in found["kernels_of_all_steps"].items() if count != 1}
    assert not several, f"the seed decides which kernel is compiled, in the middle of training: {several}"

    for capability in found["targets"]:
        for spec in found["configurations"]:
            for call, expected in EXPECTED.items():
                if is_variation(call) and not (capability == 90 and spec in with_batches(found)):
                    continue
                if call.startswith("recode") and not has_recode(CONFIGURATIONS[spec]):
                    continue
                accessed = {
                    (tensor, access["kind"])
                    for record in records
                    if (record["capability"], record["spec"], record["call"]) == (capability, spec, call)
                    for tensor, names in record["tensors"].items()
                    for access in record["accesses"]
                    if access["argument"] in names
                }
                assert expected <= accessed, (capability, spec, call, accessed)


@pytest.mark.timeout(600)
def test_kernels_of_many_units_access_memory_as_those_of_one(found):
    """They do so, or have wider accesses, although addresses, sizes and strides are in a table instead of arguments."""
    aligned = [record for record in found["compiled"] if record["variant"] == "aligned"]
    by_kernel: dict[tuple, list[dict]] = {}  # a call may launch a kernel several times
    for record in aligned:
        by_kernel.setdefault(tuple(record[key] for key in ("spec", "call", "capability", "kernel")), []).append(record)
    many = [record for record in aligned if record["call"] in SINGLE]
    assert {record["spec"] for record in many} == (with_batches(found) if 90 in found["targets"] else set())
    launched: Counter[tuple] = Counter()
    for record in many:
        compressor = CONFIGURATIONS[record["spec"]]
        if isinstance(compressor, MapQuantizer) and compressor.num_stats > 1 and compressor.block:
            continue  # a second statistic begins after all blocks, whose number may be odd
        kernel = record["kernel"].replace("_batch", "")
        key = record["spec"], SINGLE[record["call"]], record["capability"], kernel
        single = by_kernel[key][launched[key]]
        launched[key] += 1
        for kind in ("load", "store"):
            (wide, narrow), (wide_of_one, narrow_of_one) = accesses(record, kind), accesses(single, kind)
            where = record["spec"], record["call"], kernel, kind
            assert wide >= wide_of_one and narrow <= narrow_of_one, where


@pytest.mark.timeout(600)
def test_no_kernel_is_worse_than_its_row_in_the_table(found):
    """Every kernel has a row and every row a kernel, so that the table shows the effect of a change on the kernels."""
    table = read_table(TABLE)
    if made_with(table) not in ("", triton.__version__):
        pytest.skip(f"bench/results/kernels.csv is of Triton {made_with(table)}, installed is {triton.__version__}")
    table = [
        row
        for row in table
        if int(row["capability"]) in found["targets"]
        and row["configuration"] in found["varied" if is_variation(row["call"]) else "configurations"]
    ]
    worse = regressions(table, rows(found["compiled"]))
    assert not worse, "\n".join(
        ["not as bench/results/kernels.csv has it:", *worse, "to update it: make kernel-report UPDATE=1"]
    )


@for_each()
def test_sizes_share_kernels(compressor):
    """If compile-time arguments followed the size, every unit of a model would be compiled separately."""
    variants, largest = set(), torch.empty(200_000)
    for numel in range(1, largest.numel(), 4321):
        size = chunk_numel(numel, 2)
        payload = torch.empty(2, compressor.payload_nbytes(size), dtype=torch.uint8)
        with record_launches() as recorded:
            compressor.triton.encode(Encoding(compressor, largest[:numel], None, payload, 0, size))
            compressor.triton.decode(Decoding(compressor, payload[None], largest[:numel], size))
        variants |= {(launch.kernel, tuple(sorted(launch.constexprs.items(), key=str))) for launch in recorded}
    # two kernels, one for partial results and one that uses them, for each of 9 powers of two; and the decoder
    assert len(variants) <= 2 * 9 + 1
