"""Comparison of mechanisms for the host path: the measurements behind ``docs/host_path.md``.

    python -m bench.kernels.host_mechanisms                   # writes bench/results/cpu/host_mechanisms.csv; minutes
    python -m bench.kernels.host_mechanisms --numel 1Mi       # another size; rows of other sizes stay

Two compressors encode (with feedback) and decode, with one thread and with two, by each of these mechanisms:

- ``eager torch``: the reference, with one pass over memory and one temporary for every operation;
- ``numpy tiles``: NumPy on tiles that stay in the cache, with preallocated arrays and a Python thread for each share.
  NumPy releases the interpreter's lock inside an operation and takes it again between operations, so the threads pass
  it to each other a dozen times per tile;
- ``torch.compile``: the same operations in torch, compiled by Inductor for this number of threads, if g++ is installed;
- ``gckernels``: the operations lowered to C and compiled, tile by tile, on threads.

Only ``eager torch`` and ``gckernels`` write the real payload, with a header and defined bytes for values that are not
finite. The others do only the arithmetic and therefore look a little better than they would be.

Every round measures all mechanisms and a copy of 64 MiB, one after the other. ``percent_of_copy`` is the rate of the
least bytes that must move, relative to the rate of the copy. ``factor_over_eager`` is the ratio of medians.
``first_call_s`` is the time of the first call, with empty caches; ``gckernels`` compiles encode and decode together.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import statistics
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from bench.lib.cases import EAGER, FUSED, YARDSTICK_NUMEL, Case, yardstick
from bench.lib.program import program_parser
from bench.lib.record import merge_csv
from bench.lib.rounds import CPU, seconds
from bench.lib.sizes import parse_numel
from gckernels.toolkit.host import library
from gckernels.toolkit.quantizer import host as quantizer_host

TILE = 2**14  # elements; 64 KiB, so that all arrays of a tile fit the second-level cache
KEY = ("numel", "threads", "compressor", "direction", "mechanism")  # columns that identify a row
Calls = dict[str, Callable[[], Any]]  # by direction


class Sign:
    """EFSignSGD with blocks of 1024."""

    spec, block, code_nbytes = "EFSignSGD(block=1024)", 1024, 1 / 8

    @staticmethod
    def encode_numpy(values, scratch, scales, codes):
        np.abs(values, out=scratch)
        np.mean(scratch, axis=1, keepdims=True, out=scales)
        positive = values >= 0
        codes[:] = np.packbits(positive, bitorder="little")
        np.copysign(scales, values + np.float32(0), out=scratch)  # the decoded values; adding 0 turns -0.0 positive
        np.subtract(values, scratch, out=values)

    @staticmethod
    def decode_numpy(scales, codes, out):
        np.multiply(
            np.unpackbits(codes, bitorder="little").reshape(out.shape), np.float32(2), out=out, casting="unsafe"
        )
        np.subtract(out, np.float32(1), out=out)
        np.multiply(out, scales, out=out)

    @staticmethod
    def encode_torch(grad, residual, scales, codes):
        values = grad + residual
        scale = values.abs().mean(1, keepdim=True)
        positive = values >= 0
        bits = positive.view(-1, 8).to(torch.uint8)
        codes.copy_(
            functools.reduce(torch.bitwise_or, [bits[:, bit] << bit for bit in range(8)])
        )  # a sum is 200 times slower
        scales.copy_(scale)
        residual.copy_(values - torch.where(positive, scale, -scale))

    @staticmethod
    def decode_torch(scales, codes, out):
        positive = ((codes[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).view(out.shape) == 1
        out.copy_(torch.where(positive, scales, -scales))


class Linear:
    """BlockQuant with 8 bits and blocks of 256."""

    spec, block, code_nbytes = "BlockQuant(bits=8, block=256)", 256, 1

    @staticmethod
    def encode_numpy(values, scratch, scales, codes):
        np.abs(values, out=scratch)
        np.max(scratch, axis=1, keepdims=True, out=scales)
        np.divide(scales, np.float32(127), out=scales)
        np.multiply(values, np.float32(1) / np.maximum(scales, np.float32(2.0**-126)), out=scratch)
        np.rint(scratch, out=scratch)
        np.clip(scratch, -127, 127, out=scratch)
        np.add(scratch, np.float32(128), out=codes.reshape(values.shape), casting="unsafe")
        np.multiply(scratch, scales, out=scratch)
        np.subtract(values, scratch, out=values)

    @staticmethod
    def decode_numpy(scales, codes, out):
        np.subtract(codes.reshape(out.shape), np.float32(128), out=out)
        np.multiply(out, scales, out=out)

    @staticmethod
    def encode_torch(grad, residual, scales, codes):
        values = grad + residual
        scale = values.abs().amax(1, keepdim=True) / 127
        level = (values * scale.clamp(min=2.0**-126).reciprocal()).round().clamp(-127, 127)
        codes.copy_((level + 128).to(torch.uint8).flatten())
        scales.copy_(scale)
        residual.copy_(values - level * scale)

    @staticmethod
    def decode_torch(scales, codes, out):
        out.copy_((codes.view(out.shape).float() - 128) * scales)


Work = type[Sign] | type[Linear]


class Buffers:
    """Tensors that the mechanisms of this file work on; each row is a block."""

    def __init__(self, work: Work, numel: int) -> None:
        rows = numel // work.block
        self.grad, self.residual = torch.randn(rows, work.block), torch.zeros(rows, work.block)
        self.out = torch.empty(rows, work.block)
        self.scales, self.codes = torch.empty(rows, 1), torch.empty(int(numel * work.code_nbytes), dtype=torch.uint8)


def numpy_calls(work: Work, buffers: Buffers, threads: int) -> Calls:
    arrays = {name: tensor.numpy() for name, tensor in vars(buffers).items()}
    grad, residual, out, scales, codes = (arrays[name] for name in ("grad", "residual", "out", "scales", "codes"))
    rows, step = grad.shape[0], TILE // work.block
    step_nbytes = int(TILE * work.code_nbytes)
    pool = ThreadPoolExecutor(threads)

    def encode(tiles: range) -> None:
        values, scratch = (np.empty((step, work.block), np.float32) for _ in range(2))
        for tile in tiles:
            at = slice(tile * step, (tile + 1) * step)
            np.add(grad[at], residual[at], out=values)
            work.encode_numpy(values, scratch, scales[at], codes[tile * step_nbytes : (tile + 1) * step_nbytes])
            residual[at] = values

    def decode(tiles: range) -> None:
        for tile in tiles:
            at = slice(tile * step, (tile + 1) * step)
            work.decode_numpy(scales[at], codes[tile * step_nbytes : (tile + 1) * step_nbytes], out[at])

    tiles = rows // step
    shares = [range(tiles * share // threads, tiles * (share + 1) // threads) for share in range(threads)]

    def on_all(work: Callable[[range], None]) -> None:
        list(pool.map(work, shares))

    return {work.__name__: functools.partial(on_all, work) for work in (encode, decode)}


def compiled_calls(work: Work, buffers: Buffers) -> Calls:
    torch._dynamo.reset()  # the number of threads is compiled in
    encode, decode = (torch.compile(each, dynamic=False) for each in (work.encode_torch, work.decode_torch))
    b = buffers
    return {
        "encode": lambda: encode(b.grad, b.residual, b.scales, b.codes),
        "decode": lambda: decode(b.scales, b.codes, b.out),
    }


def measure(work: Work, numel: int, threads: int, num_rounds: int) -> list[dict[str, Any]]:
    """The rows of one compressor and number of threads."""
    torch.set_num_threads(threads)
    in_numpy, in_torch = Buffers(work, numel), Buffers(work, numel)
    mechanisms = {"numpy tiles": numpy_calls(work, in_numpy, threads)}
    if shutil.which("g++"):
        mechanisms["torch.compile"] = compiled_calls(work, in_torch)
    copy, rows = yardstick(CPU), []
    for direction in ("encode", "decode"):
        case = Case(work.spec, direction, 1, FUSED, numel)
        calls = {"eager torch": dataclasses.replace(case, implementation=EAGER).prepare(CPU)}
        calls |= {name: each[direction] for name, each in mechanisms.items()} | {"gckernels": case.prepare(CPU)}
        first_s = {name: seconds(call) for name, call in calls.items()}
        rounds = [{name: seconds(call) for name, call in (calls | {"copy": copy}).items()} for _ in range(num_rounds)]
        copy_rate = 8 * YARDSTICK_NUMEL / statistics.median(each["copy"] for each in rounds)
        eager_s = statistics.median(each["eager torch"] for each in rounds)
        for name in calls:
            low, middle, high = statistics.quantiles([each[name] for each in rounds], n=4, method="inclusive")
            rate = case.moved_nbytes / middle
            numbers = {"median_s": middle, "quartile_1_s": low, "quartile_3_s": high, "gb_per_s": rate / 1e9}
            numbers |= {"copy_gb_per_s": copy_rate / 1e9, "percent_of_copy": 100 * rate / copy_rate}
            numbers |= {"factor_over_eager": eager_s / middle, "first_call_s": first_s[name]}
            row = {"compressor": work.spec, "direction": direction, "mechanism": name, "threads": threads}
            row |= {"numel": numel} | {key: f"{value:.3g}" for key, value in numbers.items()}
            rows.append(row | {"load_average": f"{os.getloadavg()[0]:.1f}"})
            print(", ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    for buffers, name in ((in_numpy, "numpy tiles"), (in_torch, "torch.compile")):
        if name in mechanisms:  # check the results: decoded values plus residual are the gradient
            buffers.residual.zero_()
            mechanisms[name]["encode"](), mechanisms[name]["decode"]()
            assert torch.allclose(buffers.out + buffers.residual, buffers.grad, rtol=0, atol=1e-5), name
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = program_parser(__doc__)
    parser.add_argument("--numel", type=parse_numel, default=2**24, help="elements, a multiple of 16Ki")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    for threads in (1, 2):
        for work in (Sign, Linear):
            with tempfile.TemporaryDirectory() as folder:  # so that the first call compiles
                os.environ["GCKERNELS_CACHE"] = folder
                for each in (library.library, quantizer_host.build):
                    each.cache_clear()
                rows = measure(work, options.numel, threads, options.rounds)
            path = merge_csv("host_mechanisms", CPU, rows, KEY)
    print("written:", path.name)


if __name__ == "__main__":
    main()
