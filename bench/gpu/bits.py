"""Bitwise comparison of every compressor's kernels with the host path, on random inputs that differ in every run.

The work of a training step comes first: units bound together, with the residuals that training keeps, in 8 bits too,
and the steps of PowerSGD. Then come calls of single units, by default configurations. Bound work runs twice, because
the second call goes past Triton's own launcher. Outputs are poisoned before every call, so that unwritten bytes show.
PowerSGD's sums have an order of their own: they are compared with fp64 within the bound of fp32, and bit for bit with
their own repetition.

Writes ``bits.csv`` with a row per compressor, size, dtype and call, and the seed that reproduces the row. Worker
processes compare one configuration after another: a kernel that breaks its process's connection to the GPU affects only
its own configuration.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeAlias

import torch

from bench.gpu import low_rank
from bench.gpu.parts import Result
from bench.lib.budget import Budget
from bench.lib.faults import DIED, is_broken
from bench.lib.record import csv_path, merge_csv
from gckernels import Codec, decode_residual, encode_residual, residual_nbytes
from gckernels.codec import SEED_MASK, Backend, Decoding, Encoding, Recoding, Work
from gckernels.testing.agreement import assert_payloads_equal, expected_residual
from gckernels.testing.configurations import CONFIGURATIONS, DEFAULTS
from gckernels.toolkit.kernels.launch import Launch, record_launches
from gckernels.toolkit.reference import last_state

SHAPES = ((1500, torch.float32), (2**20, torch.bfloat16))  # elements and dtypes of gradients
MORE_SHAPES = ((1, torch.float32), (2**22, torch.bfloat16))  # for default configurations
MERGED_SOURCES = 3
NUM_PROCESSES = 6
POISON_BYTE = 0xCD
ADDED = 0x9E3779B97F4A7C15 & SEED_MASK  # to the seeds of bound units
KEY = ("compressor", "numel", "dtype", "call")
MAX_SHOWN = 12  # disagreements in the summary

Row = dict[str, Any]
Unit: TypeAlias = Encoding | Decoding | Recoding
Task = tuple[str, bool]
"""The name of a configuration, and whether its units are bound."""
Normal: TypeAlias = Callable[[int], torch.Tensor]
"""Makes the values of a vector, normally distributed fp32; ``torch.empty`` where only launches are recorded."""


# -------------------------------------------------------------------- calls


class Call:
    """A call of a compressor's back ends.

    Attributes:
        name: in the table.
        units: on the CPU, with the tensors' values before the call.
        is_bound: whether the units are bound together; otherwise there is one.
    """

    def __init__(self, name: str, *units: Unit, is_bound: bool = False) -> None:
        self.name, self.units, self.is_bound = name, units, is_bound

    def work(self, backend: Backend, units: Sequence[Any], is_bound: bool) -> Work:
        """A function that lets a back end do the call with these units; several payloads are added to the output."""
        first = units[0]
        sources = 1 if isinstance(first, Encoding) else first.payloads.shape[0]
        scale = () if isinstance(first, Encoding) else (1.0 / sources,)
        more = (sources > 1,) if isinstance(first, Decoding) else ()
        name = type(first).__name__.lower().removesuffix("ing") + "e"
        if not is_bound:

            def one_by_one() -> None:
                for unit in units:
                    getattr(backend, name)(unit, *scale, *more)

            return one_by_one
        if isinstance(first, Decoding):
            return backend.bind_decodes(units, *scale, *more)
        encoder, added = first.compressor, None
        if isinstance(first, Recoding):
            encoder = encoder.shard_compressor
        if encoder.traits.stochastic:
            device = first.payload.device
            added = torch.full((1,), ADDED, dtype=torch.int64, device=device)
            units = [dataclasses.replace(unit, seed=(unit.seed - ADDED) & SEED_MASK) for unit in units]
        return getattr(backend, f"bind_{name}s")(units, *(scale or (1.0,)), added)


def bound_calls(compressor: Codec, numel: int, dtype: torch.dtype, normal: Normal) -> Iterator[Call]:
    """Yield what a step of training does with units of two sizes."""
    sizes = (numel, max(1, numel // 4))
    fp32 = "fp32" if compressor.traits.needs_feedback else ""
    for kind in (fp32, "8 bits") if compressor.encodes_residuals else (fp32,):
        encodings = [_encoding(compressor, size, dtype, kind, normal) for size in sizes]
        yield Call(f"bound encodes{_with(kind)}", *encodings, is_bound=True)
        recodings = [_recoding(compressor, size, kind, normal) for size in sizes]
        yield Call(f"bound recodes{_with(kind)}", *recodings, is_bound=True)
    for sources in (1, MERGED_SOURCES):
        decodings = [_decoding(compressor, size, dtype, sources, normal) for size in sizes]
        yield Call(f"bound decodes {sources}", *decodings, is_bound=True)


def single_calls(compressor: Codec, numel: int, dtype: torch.dtype, normal: Normal) -> Iterator[Call]:
    """Yield calls of one unit."""
    for kind in ("", "fp32"):
        yield Call(f"encode{_with(kind)}", _encoding(compressor, numel, dtype, kind, normal))
    for sources in (1, MERGED_SOURCES):
        yield Call(f"decode {sources}", _decoding(compressor, numel, dtype, sources, normal))
    yield Call("recode", _recoding(compressor, numel, "fp32", normal))


def launches(task: Task, numel: int, dtype: torch.dtype) -> list[Launch]:
    """The launches of a task's calls."""
    spec, is_bound = task
    if spec in low_rank.METHODS:
        return low_rank.launches(low_rank.METHODS[spec], numel, dtype)
    calls = bound_calls if is_bound else single_calls
    with record_launches() as recorded:
        for call in calls(CONFIGURATIONS[spec], numel, dtype, torch.empty):
            call.work(CONFIGURATIONS[spec].triton, call.units, is_bound)()
    return recorded


# -------------------------------------------------------------------- units


def _with(kind: str) -> str:
    return f" with feedback in {kind}" if kind else ""


def _residual(encoder: Codec, numel: int, kind: str, normal: Normal) -> torch.Tensor | None:
    if not kind:
        return None
    if kind == "fp32":
        return normal(encoder.traits.states * numel)
    if normal is torch.empty:
        return torch.empty(1, residual_nbytes(numel), dtype=torch.uint8, device="cpu")
    return encode_residual(normal(numel) / 8)


def _poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, POISON_BYTE, dtype=torch.uint8, device="cpu")


def _encoding(compressor: Codec, numel: int, dtype: torch.dtype, kind: str, normal: Normal) -> Encoding:
    payload = _poisoned(1, compressor.payload_nbytes(numel))
    residual = _residual(compressor, numel, kind, normal)
    return Encoding(compressor, normal(numel).to(dtype), residual, payload, 12345, numel)


def _payloads(compressor: Codec, numel: int, sources: int, normal: Normal) -> torch.Tensor:
    payloads = _poisoned(sources, compressor.payload_nbytes(numel))
    for payload in payloads if normal is not torch.empty else ():
        compressor.host.encode(Encoding(compressor, normal(numel), None, payload[None], 12345, numel))
    return payloads


def _decoding(compressor: Codec, numel: int, dtype: torch.dtype, sources: int, normal: Normal) -> Decoding:
    # several payloads are added to the output, so its old values cannot be poison
    out = torch.full((numel,), torch.nan, device="cpu") if sources == 1 else normal(numel)
    return Decoding(compressor, _payloads(compressor, numel, sources, normal)[:, None], out.to(dtype), numel)


def _recoding(compressor: Codec, numel: int, kind: str, normal: Normal) -> Recoding:
    shard = compressor.shard_compressor
    residual = _residual(shard, numel, kind, normal)
    payloads = _payloads(compressor, numel, MERGED_SOURCES, normal)
    return Recoding(compressor, payloads, residual, torch.full_like(payloads[0], POISON_BYTE), numel, 54321, numel)


def moved(unit: Any, device: torch.device) -> Any:
    """A copy of the unit and all its tensors on a device."""
    return dataclasses.replace(unit, **{name: each.to(device, copy=True) for name, each in _tensors(unit)})


def _tensors(unit: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for field in dataclasses.fields(unit):
        if isinstance(value := getattr(unit, field.name), torch.Tensor):
            yield field.name, value


# -------------------------------------------------------------------- comparison


def compare(
    task: Task, numel: int, dtype: torch.dtype, device: torch.device, seed: int
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield every call's name, with a function that calls both implementations and raises unless they agree."""
    random = torch.Generator().manual_seed(seed)
    spec, is_bound = task
    if spec in low_rank.METHODS:
        yield from low_rank.compare(low_rank.METHODS[spec], numel, dtype, device, random)
        return
    calls = bound_calls if is_bound else single_calls
    for call in calls(CONFIGURATIONS[spec], numel, dtype, lambda count: torch.randn(count, generator=random)):
        yield call.name, functools.partial(check, call, device)


def check(call: Call, device: torch.device) -> None:
    """Let both implementations do a call; bound work once more with the same tensors.

    Raises:
        AssertionError: their results differ.
    """
    compressor = call.units[0].compressor
    on_device = [moved(unit, device) for unit in call.units]
    work = call.work(compressor.triton, on_device, call.is_bound)
    on_host = [moved(unit, torch.device("cpu")) for unit in call.units]
    call.work(compressor.host, on_host, False)()
    for _ in range(2 if call.is_bound else 1):
        for given, got in zip(call.units, on_device, strict=True):
            for name, values in _tensors(given):
                getattr(got, name).copy_(values)
        work()
        for given, got, want in zip(call.units, on_device, on_host, strict=True):
            if isinstance(given, Decoding):
                _assert_equal(got.out.cpu(), want.out)
            else:
                _assert_encoded(given, got, want)


def _assert_encoded(given: Any, got: Any, want: Any) -> None:
    """Assert that payload and residual are right: the residual is what the payload leaves."""
    encoder, numel, residual = given.compressor, given.size, given.residual
    if isinstance(given, Recoding):
        merged = torch.empty(numel)
        encoder.host.decode(Decoding(encoder, given.payloads[:, None], merged, numel), 1.0 / len(given.payloads))
        encoder, grad = encoder.shard_compressor, merged
    else:
        grad = given.grad
    in_8_bits = residual is not None and residual.dtype == torch.uint8
    if in_8_bits:
        residual = decode_residual(residual, numel)
    values = grad.float() if residual is None else last_state(encoder.accumulate(grad.float(), residual), numel)
    payload = got.payload.cpu().view(1, -1)
    assert_payloads_equal(encoder, numel, payload, want.payload.view(1, -1), values, given.seed)
    if residual is not None:
        expected = expected_residual(encoder, grad, residual, payload, numel)
        _assert_equal(got.residual.cpu(), encode_residual(expected) if in_8_bits else expected)


def _assert_equal(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def shapes_of(task: Task) -> tuple[tuple[int, torch.dtype], ...]:
    """Elements of the units of a task, with the dtypes of gradients: default configurations have more of them."""
    return (*SHAPES, *MORE_SHAPES) if task[0] in DEFAULTS else SHAPES


def rows_of(task: Task, device: torch.device) -> list[Row]:
    """A row for every call of a task, up to the call that broke the connection to the GPU, if one did."""
    rows = []
    for numel, dtype in shapes_of(task):
        seed = int.from_bytes(os.urandom(4), "little")
        for call, agree in compare(task, numel, dtype, device, seed):
            message = _fault(agree)
            row = {"compressor": task[0], "numel": numel, "dtype": str(dtype).removeprefix("torch."), "call": call}
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


def in_order() -> list[Task]:
    """All tasks, first what training launches. Only default configurations have tasks of single units, whose kernels
    are made of the same pieces."""
    specs = [*DEFAULTS, *low_rank.METHODS, *(spec for spec in CONFIGURATIONS if spec not in DEFAULTS)]
    return [*((spec, True) for spec in specs), *((spec, False) for spec in DEFAULTS)]


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
        task: what is being compared; ``None`` when the worker is idle.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.connection, theirs = context.Pipe()
        self.task: Task | None = None
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def give(self, tasks: list[Task]) -> None:
        """Send the next of ``tasks`` to the worker, or end it when none is left."""
        self.task = tasks.pop(0) if tasks else None
        with contextlib.suppress(OSError):  # the worker has died: `answer` reports it
            self.connection.send(self.task)

    def answer(self) -> list[Row]:
        """The rows of the task; a single row with an error if the worker has died."""
        assert self.task is not None
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return [_lost(self.task, DIED)]

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def serve(connection: Connection) -> None:
    """Run a worker: answer every task with its rows, until one breaks the connection to the GPU."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // NUM_PROCESSES))
    while (task := connection.recv()) is not None:
        rows = rows_of(task, torch.device("cuda"))
        connection.send(rows)
        if is_broken(rows[-1]["message"]):
            return


def _in_processes(tasks: list[Task], budget: Budget) -> Iterator[list[Row]]:
    processes = [_Process() for _ in range(min(NUM_PROCESSES, len(tasks)))]
    try:
        for process in processes:
            process.give(tasks)
        while any(process.task for process in processes) and budget.left_s > 0:
            ready = wait([process.connection for process in processes if process.task], budget.left_s)
            for process in [each for each in processes if each.connection in ready]:
                rows = process.answer()
                yield rows
                if is_broken(rows[-1]["message"]):
                    processes.remove(process)
                    process.end()
                    if not tasks:
                        continue
                    process = _Process()
                    processes.append(process)
                process.give(tasks)
        for process in processes:
            if process.task is not None:
                yield [_lost(process.task, "no answer in time")]
        budget.left_out += [f"{spec}{', bound' if is_bound else ''}" for spec, is_bound in tasks]
    finally:
        for process in processes:
            process.end()


def _lost(task: Task, message: str) -> Row:
    return {"compressor": task[0], "numel": "", "dtype": "", "call": "", "seed": "", "agree": "no", "message": message}
