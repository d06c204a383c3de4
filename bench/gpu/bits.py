"""Bitwise comparison of every compressor's kernels with the host path, on random inputs that differ in every run.

Outputs are poisoned before every call, so that unwritten bytes show. Writes ``bits.csv`` with a row per compressor,
size, dtype and call, and the seed that reproduces the row. Worker processes compare one configuration after another: a
kernel that breaks its process's connection to the GPU affects only its own configuration.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from bench.gpu.parts import Result
from bench.lib.budget import Budget
from bench.lib.faults import DIED, is_broken
from bench.lib.record import csv_path, merge_csv
from gckernels import Codec
from gckernels.codec import Backend, Decoding, Encoding, Recoding
from gckernels.testing.agreement import assert_payloads_equal, expected_residual
from gckernels.testing.configurations import CONFIGURATIONS, DEFAULTS
from gckernels.toolkit.kernels.launch import Launch, record_launches
from gckernels.toolkit.reference import last_state

SIZES = (1, 1500, 100_003, 2**22)
DTYPES = (torch.float32, torch.bfloat16)
MERGED_SOURCES = 3
NUM_PROCESSES = 6
POISON_BYTE = 0xCD
KEY = ("compressor", "numel", "dtype", "call")
MAX_SHOWN = 12  # disagreements in the summary

Row = dict[str, Any]


# -------------------------------------------------------------------- calls on the host path and by the kernels


def encode(
    backend: Backend, compressor: Codec, grad: torch.Tensor, residual: torch.Tensor | None, payload: torch.Tensor
) -> None:
    """Encode like ``Codec.encode``, by the host or by the Triton back end."""
    backend.encode(Encoding(compressor, grad, residual, payload[None], 12345, grad.numel()))


def decode(backend: Backend, compressor: Codec, payloads: torch.Tensor, out: torch.Tensor) -> None:
    """Write the mean of ``payloads`` ``[sources, nbytes]`` into ``out``; several payloads are added to ``out``."""
    sources = payloads.shape[0]
    backend.decode(Decoding(compressor, payloads[:, None], out, out.numel()), 1.0 / sources, sources > 1)


def recode(
    backend: Backend,
    compressor: Codec,
    payloads: torch.Tensor,
    residual: torch.Tensor | None,
    payload: torch.Tensor,
    numel: int,
) -> None:
    """Recode like ``Codec.recode``."""
    backend.recode(Recoding(compressor, payloads, residual, payload, numel, 54321, numel), 1.0 / payloads.shape[0])


def launches(compressor: Codec, numel: int, dtype: torch.dtype) -> list[Launch]:
    """The launches that :func:`compare` would make."""
    grad, residual = torch.empty(numel, dtype=dtype), torch.empty(compressor.traits.states * numel)
    payloads = torch.empty(MERGED_SOURCES, compressor.payload_nbytes(numel), dtype=torch.uint8)
    shard = torch.empty(compressor.shard_compressor.traits.states * numel)
    with record_launches() as recorded:
        for feedback in (None, residual):
            encode(compressor.triton, compressor, grad, feedback, payloads[0])
        for sources in (payloads[:1], payloads):
            decode(compressor.triton, compressor, sources, grad)
        recode(compressor.triton, compressor, payloads, shard, torch.empty_like(payloads[0]), numel)
    return recorded


# -------------------------------------------------------------------- comparison


def compare(
    compressor: Codec, numel: int, dtype: torch.dtype, device: torch.device, seed: int
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield every call's name, with a function that calls both implementations and raises unless they agree."""
    random = torch.Generator().manual_seed(seed)
    nbytes, shard = compressor.payload_nbytes(numel), compressor.shard_compressor

    def normal(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(count, generator=random).to(dtype)

    def poisoned(*shape: int) -> torch.Tensor:
        return torch.full(shape, POISON_BYTE, dtype=torch.uint8)

    grad, old_residual = normal(numel, dtype), normal(compressor.traits.states * numel)
    payloads = poisoned(MERGED_SOURCES, nbytes)
    for payload in payloads:
        encode(compressor.host, compressor, normal(numel, dtype), None, payload)

    def check_encode(residual: torch.Tensor | None) -> None:
        want, got = poisoned(nbytes), poisoned(nbytes).to(device)
        new_residual = None if residual is None else residual.to(device, copy=True)
        encode(compressor.triton, compressor, grad.to(device), new_residual, got)
        encode(compressor.host, compressor, grad, None if residual is None else residual.clone(), want)
        values = grad.float()
        if residual is not None:
            values = last_state(compressor.accumulate(values, residual), numel)
        assert_payloads_equal(compressor, numel, got.cpu()[None], want[None], values, 12345)
        if new_residual is not None and residual is not None:
            _assert_equal(new_residual.cpu(), expected_residual(compressor, grad, residual, got.cpu()[None], numel))

    def check_decode(sources: torch.Tensor) -> None:
        # several payloads are added to the output, so its old values cannot be poison
        before = torch.full((numel,), torch.nan, dtype=dtype) if len(sources) == 1 else grad
        want, got = before.clone(), before.to(device, copy=True)
        decode(compressor.triton, compressor, sources.to(device), got)
        decode(compressor.host, compressor, sources, want)
        _assert_equal(got.cpu(), want)

    def check_recode() -> None:
        residual = normal(shard.traits.states * numel)
        want, got = poisoned(nbytes), poisoned(nbytes).to(device)
        new_residual = residual.to(device, copy=True)
        recode(compressor.triton, compressor, payloads.to(device), new_residual, got, numel)
        recode(compressor.host, compressor, payloads, residual.clone(), want, numel)
        merged = torch.empty(numel)
        compressor.host.decode(Decoding(compressor, payloads[:, None], merged, numel), 1.0 / MERGED_SOURCES)
        values = last_state(shard.accumulate(merged, residual), numel)
        assert_payloads_equal(shard, numel, got.cpu()[None], want[None], values, 54321)
        _assert_equal(new_residual.cpu(), expected_residual(shard, merged, residual, got.cpu()[None], numel))

    yield "encode", lambda: check_encode(None)
    yield "encode with feedback", lambda: check_encode(old_residual)
    yield "decode", lambda: check_decode(payloads[:1])
    yield f"decode {MERGED_SOURCES}", lambda: check_decode(payloads)
    yield "recode", check_recode


def _assert_equal(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def rows_of(spec: str, device: torch.device) -> list[Row]:
    """A row for every call of a configuration, up to the call that broke the connection to the GPU, if one did."""
    rows = []
    for numel in SIZES:
        for dtype in DTYPES:
            seed = int.from_bytes(os.urandom(4), "little")
            for call, check in compare(CONFIGURATIONS[spec], numel, dtype, device, seed):
                message = _fault(check)
                row = {"compressor": spec, "numel": numel, "dtype": str(dtype).removeprefix("torch."), "call": call}
                rows.append(row | {"seed": seed, "agree": "no" if message else "yes", "message": message})
                if is_broken(message):
                    return rows
    return rows


def _fault(check: Callable[[], None]) -> str:
    try:
        check()
    except Exception as error:  # any error is a fault to report
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]
    return ""


# -------------------------------------------------------------------- worker processes


def in_order() -> list[str]:
    """Names of all configurations, the default ones first."""
    return [*DEFAULTS, *(spec for spec in CONFIGURATIONS if spec not in DEFAULTS)]


def measure(budget: Budget) -> Result:
    """Compare all configurations; the result names those that disagree."""
    device = torch.device("cuda")
    csv_path("bits", device).unlink(missing_ok=True)
    rows: list[Row] = []
    for new_rows in _in_processes(in_order(), budget):
        merge_csv("bits", device, new_rows, KEY)
        rows += new_rows
    wrong = [row for row in rows if row["agree"] == "no"]
    by_spec = Counter(row["compressor"] for row in wrong)
    lines = [f"{len(rows) - len(wrong)} of {len(rows)} calls agree, {len(by_spec)} configurations have wrong calls"]
    lines += [f"{spec}: {count}" for spec, count in by_spec.most_common(MAX_SHOWN)]
    lines += [f"{row['compressor']} {row['numel']} {row['dtype']} {row['call']}: {row['message']}" for row in wrong][
        :MAX_SHOWN
    ]
    return Result(bool(rows) and not wrong, lines)


class _Process:
    """The parent's handle of a worker process that compares configurations.

    Attributes:
        connection: the parent's end of the pipe.
        spec: the configuration being compared; ``None`` when the worker is idle.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.connection, theirs = context.Pipe()
        self.spec: str | None = None
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def give(self, specs: list[str]) -> None:
        """Send the next of ``specs`` to the worker, or end it when none is left."""
        self.spec = specs.pop(0) if specs else None
        with contextlib.suppress(OSError):  # the worker has died: `answer` reports it
            self.connection.send(self.spec)

    def answer(self) -> list[Row]:
        """The rows of the configuration; a single row with an error if the worker has died."""
        assert self.spec is not None
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return [_lost(self.spec, DIED)]

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def serve(connection: Connection) -> None:
    """Run a worker: answer every configuration with its rows, until one breaks the connection to the GPU."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // NUM_PROCESSES))
    while (spec := connection.recv()) is not None:
        rows = rows_of(spec, torch.device("cuda"))
        connection.send(rows)
        if is_broken(rows[-1]["message"]):
            return


def _in_processes(specs: list[str], budget: Budget) -> Iterator[list[Row]]:
    processes = [_Process() for _ in range(min(NUM_PROCESSES, len(specs)))]
    try:
        for process in processes:
            process.give(specs)
        while any(process.spec for process in processes) and budget.left_s > 0:
            ready = wait([process.connection for process in processes if process.spec], budget.left_s)
            for process in [each for each in processes if each.connection in ready]:
                rows = process.answer()
                yield rows
                if is_broken(rows[-1]["message"]):
                    processes.remove(process)
                    process.end()
                    if not specs:
                        continue
                    process = _Process()
                    processes.append(process)
                process.give(specs)
        for process in processes:
            if process.spec is not None:
                yield [_lost(process.spec, "no answer in time")]
        budget.left_out += specs
    finally:
        for process in processes:
            process.end()


def _lost(spec: str, message: str) -> Row:
    return {"compressor": spec, "numel": "", "dtype": "", "call": "", "seed": "", "agree": "no", "message": message}
