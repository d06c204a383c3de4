"""Compile every kernel of every configuration for GPUs that need not be installed; print the results as JSON.

This is a script, because it needs a process without ``TRITON_INTERPRET``, which the tests set: :func:`collect` starts
one. ``tests/conformance/test_ahead_of_time.py`` checks the results, and ``kernel_table.py`` makes a table of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from gckernels import Codec, chunk_numel, residual_nbytes
from gckernels.codec import Backend, Decoding, Encoding, Recoding
from gckernels.ops.powersgd import kernels as powersgd_kernels
from gckernels.testing.configurations import CONFIGURATIONS, DEFAULTS
from gckernels.toolkit.kernels import sharing
from gckernels.toolkit.kernels.launch import Launch, record_launches
from gckernels.toolkit.kernels.sharing import KernelBackend
from harness.machine_code.aot import TARGETS, compile_launches, specialize

# name: (dtype of gradient and output, elements, chunks, sources); shapes and addresses alone matter: nothing is filled
VARIANTS = {
    "aligned": (torch.float32, 2**20, 4, 3),
    "aligned-bf16": (torch.bfloat16, 2**20, 4, 3),
    "odd": (torch.float32, 2**20 + 3, 1, 1),
}


Call = tuple[str, dict[str, torch.Tensor], list[Launch]]
"""The name of a call, its tensors, and what it launches."""


def launches(compressor: Codec, variant: str) -> list[Call]:
    """The launches of a variant: encode without and with feedback and decode; and, where they have kernels of their
    own, recode, and encode with feedback, decode and recode of many units."""
    shape = VARIANTS[variant]
    calls = calls_of_one(compressor, *shape, accumulate=variant == "odd")
    if variant == "aligned" and has_batches(compressor):
        calls += calls_of_many(compressor, *shape)
    return calls


def calls_of_one(
    compressor: Codec, dtype: torch.dtype, numel: int, chunks: int, sources: int, accumulate: bool
) -> list[Call]:
    """Encode without and with feedback, and decode."""
    size, payloads, grad, residual = _tensors(compressor, dtype, numel, chunks, sources)
    with record_launches() as plain:
        compressor.triton.encode(Encoding(compressor, grad, None, payloads[0], 12345, size))
    with record_launches() as feedback:
        compressor.triton.encode(Encoding(compressor, grad, residual, payloads[0], 12345, size))
    with record_launches() as decode:
        compressor.triton.decode(Decoding(compressor, payloads, grad, size), 0.25, accumulate)
    return [
        ("encode", {"grad": grad}, plain),
        ("encode with feedback", {"grad": grad, "residual": residual}, feedback),
        ("decode", {"out": grad}, decode),
    ]


def calls_of_many(compressor: Codec, dtype: torch.dtype, numel: int, chunks: int, sources: int) -> list[Call]:
    """Encode with feedback and decode of many units; recode, of one and of many, where that has kernels of its own."""
    size, payloads, grad, residual = _tensors(compressor, dtype, numel, chunks, sources)
    shard, payload = residual[:size], torch.empty_like(payloads[0, 0])
    triton, added = (
        compressor.triton,
        torch.zeros(1, dtype=torch.int64, device="cpu") if compressor.traits.stochastic else None,
    )
    works: dict[str, Callable[[], object]] = {
        "encode many": triton.bind_encodes([Encoding(compressor, grad, residual, payloads[0], 0, size)], 1.0, added),
        "decode many": triton.bind_decodes([Decoding(compressor, payloads, grad, size)], 0.25, False),
    }
    calls: list[Call] = []
    if has_recode(compressor):
        with record_launches() as recode:
            unit = Recoding(compressor, payloads[:, 0], shard, payload, shard.numel(), 12345, size)
            triton.recode(unit, 0.25)
        calls.append(("recode", {"residual": shard}, recode))
        works["recode many"] = triton.bind_recodes(
            [Recoding(compressor, payloads[:, 0], shard, payload, shard.numel(), 0, size)], 0.25, added
        )
    for call, work in works.items():
        with record_launches() as many:
            work()
        calls.append((call, {}, many))
    return calls


def calls_with_encoded_residuals(
    compressor: Codec, dtype: torch.dtype, numel: int, chunks: int, sources: int
) -> list[Call]:
    """Encode with residuals in 8 bits, of one unit and of many; none if the compressor takes no such residuals."""
    if not compressor.encodes_residuals:
        return []
    size, payloads, grad, _ = _tensors(compressor, dtype, numel, chunks, sources)
    residual = torch.empty(chunks, residual_nbytes(size), dtype=torch.uint8, device="cpu")
    unit = Encoding(compressor, grad, residual, payloads[0], 0, size)
    with record_launches() as one:
        compressor.triton.encode(unit)
    work = compressor.triton.bind_encodes([unit])
    with record_launches() as many:
        work()
    tensors = {"grad": grad, "residual": residual}
    return [("encode with a residual in 8 bits", tensors, one), ("encode many with residuals in 8 bits", {}, many)]


def call_of_large(compressor: Codec, dtype: torch.dtype, numel: int, chunks: int, sources: int) -> Call:
    """Encode with feedback as a bound unit that has its own launches, whose seed is read from memory."""
    size, payloads, grad, residual = _tensors(compressor, dtype, numel, chunks, sources)
    unit, added = (
        Encoding(compressor, grad, residual, payloads[0], 0, size),
        torch.zeros(1, dtype=torch.int64, device="cpu"),
    )
    with mock.patch.object(sharing, "OWN_LAUNCH", 0):
        work = compressor.triton.bind_encodes([unit], 1.0, added)
    with record_launches() as recorded:
        work()
    return "encode as a large unit", {"grad": grad, "residual": residual}, recorded


def _tensors(
    compressor: Codec, dtype: torch.dtype, numel: int, chunks: int, sources: int
) -> tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Elements of a chunk, payloads, gradient, residual."""
    size = chunk_numel(numel, chunks)
    payloads = torch.empty(sources, chunks, compressor.payload_nbytes(size), dtype=torch.uint8, device="cpu")
    grad = torch.empty(numel, dtype=dtype, device="cpu")
    return size, payloads, grad, grad.new_empty(compressor.traits.states * numel, dtype=torch.float32)


def launches_of_powersgd(dtype: torch.dtype, rows: int, cols: int, rank: int) -> list[Launch]:
    """All launches of :func:`calls_of_powersgd`."""
    return [launch for _, _, recorded in calls_of_powersgd(dtype, rows, cols, rank) for launch in recorded]


def calls_of_powersgd(dtype: torch.dtype, rows: int, cols: int, rank: int) -> list[Call]:
    """The stages of PowerSGD for one matrix of gradients of ``dtype``.

    Encode is both projections, decode is the product of the factors, which encode with feedback has, too, because it
    writes the residual. Bases are orthonormal factors, and factors that are kept for the next step.
    """
    grads = [torch.empty(rows * cols, dtype=dtype, device="cpu")]
    residuals = [torch.empty(rows * cols, dtype=torch.float32, device="cpu")]
    left, right = ([residuals[0].new_empty(rank, side)] for side in (rows, cols))
    recorded: list[tuple[list[Launch], list[Launch]]] = []
    for kept in (residuals, []):
        with record_launches() as projections:
            powersgd_kernels.left(grads, kept, right, left, 0.5)
            powersgd_kernels.right(grads, kept, left, right, 0.5)
        with record_launches() as product:
            powersgd_kernels.reconstruct(left, right, grads, kept)
        recorded.append((projections, product))
    with record_launches() as bases:
        powersgd_kernels.orthogonalise(left, None)
        powersgd_kernels.orthogonalise(left, [1], torch.zeros(1, dtype=torch.int64, device="cpu"))
        powersgd_kernels.keep(left, [torch.empty_like(left[0])])
        powersgd_kernels.keep(left, [])
    (feedback, feedback_product), (plain, plain_product) = recorded
    return [
        ("encode with feedback", {}, [*feedback, *feedback_product]),
        ("encode", {}, plain),
        ("decode", {}, plain_product),
        ("bases", {}, bases),
    ]


def has_batches(compressor: Codec) -> bool:
    """Whether many units at once have kernels of their own."""
    return isinstance(compressor.triton, KernelBackend)


def has_recode(compressor: Codec) -> bool:
    """Whether recode has kernels of its own, other than those of decode and encode."""
    return type(compressor.triton).recode is not Backend.recode


def is_variation(call: str) -> bool:
    """Whether the kernels of a call are made of the same pieces as those of others."""
    return call == "recode" or call.endswith(" many")


def waits(launch: Launch) -> bool | None:
    """Whether the barriers of a kernel wait for memory; ``None`` if its threads exchange nothing."""
    return getattr(launch.constexprs.get("C"), "waits", launch.constexprs.get("WAITS"))


def arguments(launch: Launch, tensor: torch.Tensor) -> list[str]:
    """Names of the kernel's arguments that are this tensor."""
    named = zip(launch.kernel.arg_names, launch.args, strict=False)
    return [name for name, value in named if isinstance(value, torch.Tensor) and value.data_ptr() == tensor.data_ptr()]


# Variants by compute capability. Every configuration is compiled for all of them with addresses and sizes that are
# multiples of 16 bytes; other addresses and sizes depend on the kernel's text more than on the GPU.
WORK = {
    80: [("aligned", CONFIGURATIONS), ("odd", DEFAULTS)],
    90: [("aligned", CONFIGURATIONS)],
    100: [("aligned", CONFIGURATIONS), ("aligned-bf16", DEFAULTS)],
}
assert set(WORK) == set(TARGETS)


def records(targets: Collection[int], configurations: Collection[str], varied: Collection[str]) -> list[dict]:
    """One record per launch of these configurations for these compute capabilities; see :func:`collect`."""
    found: list[dict[str, Any]] = []
    work = []
    for capability in targets:
        for variant, compressors in WORK[capability]:
            for spec in filter(configurations.__contains__, compressors):
                for call, tensors, recorded in launches(compressors[spec], variant):
                    if is_variation(call) and not (capability == 90 and spec in varied):  # once
                        continue
                    for launch in recorded:
                        named = {name: arguments(launch, tensor) for name, tensor in tensors.items()}
                        found.append(
                            # without tensors their addresses are in a table
                            {"spec": spec, "variant": variant, "call": call, "tensors": named or {"units": ["?"]}}
                        )
                        work.append((launch, capability))
    for record, compiled in zip(found, compile_launches(work), strict=True):
        record |= dataclasses.asdict(compiled)
        record["instructions_per_element"] = compiled.instructions_per_element
    return found


def kernels_of_all_steps(compressor: Codec) -> int:
    """How many kernels are compiled to encode the same unit with many seeds."""
    grad = torch.empty(1000, dtype=torch.float32, device="cpu")
    payload = grad.new_empty(1, compressor.payload_nbytes(1000), dtype=torch.uint8)
    kernels = set()
    for seed in (0, 1, 2, 16, -1, 2**31, 2**32 + 1, -(2**63)):
        with record_launches() as recorded:
            compressor.triton.encode(Encoding(compressor, grad, None, payload, seed, 1000))
        kernels |= {(launch.name, str(specialize(launch, TARGETS[0]))) for launch in recorded}
    return len(kernels) - len(recorded) + 1


def collect(
    targets: Collection[int] = TARGETS,
    configurations: Collection[str] = CONFIGURATIONS,
    varied: Collection[str] = CONFIGURATIONS,
) -> dict:
    """The output of this script.

    Args:
        targets: the compute capabilities to compile for.
        configurations: which, by their names in ``configurations.py``.
        varied: configurations of which variations (see :func:`is_variation`) are compiled too.

    Returns:
        ``compiled``: a record per launch, of :func:`records`; ``kernels_of_all_steps``, by configuration.

    Raises:
        RuntimeError: a kernel does not compile; the message is the script's output.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])  # gckernels need not be installed
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    asked = json.dumps([*targets]), json.dumps([*configurations]), json.dumps([*varied])
    script = subprocess.run(
        [sys.executable, __file__, *asked], env=environment, capture_output=True, text=True, check=False
    )
    if script.returncode:
        raise RuntimeError(f"{__file__} ended with {script.returncode}:\n{script.stderr}")
    return json.loads(script.stdout)


if __name__ == "__main__":
    targets, configurations, varied = map(json.loads, sys.argv[1:])
    steps = {spec: kernels_of_all_steps(CONFIGURATIONS[spec]) for spec in configurations}
    json.dump({"compiled": records(targets, configurations, varied), "kernels_of_all_steps": steps}, sys.stdout)
