"""Checks of the arguments that bound launches pass to a driver, made with a driver that launches nothing.

``test_bound_launches.py`` runs this script in a process without ``TRITON_INTERPRET``.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl

import gckernels
from gckernels.codec import Decoding, Encoding
from gckernels.toolkit.kernels import sharing
from gckernels.toolkit.kernels.launch import BoundLaunch, Launch, launch
from harness import fake_driver

driver = fake_driver.install()
received: list[tuple[Any, ...]] = []  # arguments of the driver's launches
driver.launched = lambda *launched: received.append(launched)


def bind_launch(kernel, grid, *args, num_warps=4, maxnreg=None, **constexprs) -> BoundLaunch:
    return BoundLaunch(Launch(kernel, grid, args, constexprs, num_warps, maxnreg))


@triton.jit(do_not_specialize=["seed"])
def _fill_kernel(out_ptr, numel, seed: tl.int64, COUNT: tl.constexpr):
    offsets = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    tl.store(out_ptr + offsets, tl.zeros((COUNT,), tl.float32) + seed, mask=offsets < numel)


def launched(call: Any) -> list[tuple[Any, ...]]:
    """The launches that the driver receives during ``call``."""
    received.clear()
    call()
    return list(received)


def check_a_bound_launch_compiles_once() -> None:
    out, before = torch.empty(100), driver.compiled
    bound = bind_launch(_fill_kernel, (2,), out, 100, 7, COUNT=64)
    for _ in range(3):
        ordinary = launched(lambda: launch(_fill_kernel, (2,), out, 100, 7, COUNT=64))
        assert launched(bound) == ordinary
        (((x, y, z), _, kernel, (_, _, seed, count)),) = ordinary
        assert (x, y, z, kernel, seed, count) == (2, 1, 1, _fill_kernel, 7, 64)
    assert driver.compiled == before + 1


def check_a_bound_launch_goes_to_the_current_device_and_stream() -> None:
    bound = bind_launch(_fill_kernel, (2,), torch.empty(100), 100, 0, COUNT=32)
    before = driver.compiled
    for step in range(3):
        for driver.device in (0, 1):
            driver.stream = 10 * step + driver.device
            ((_, stream, _, _),) = launched(bound)
            assert stream == driver.stream
    driver.device = driver.stream = 0
    assert driver.compiled == before + 2


def check_hooks_of_profilers_are_called() -> None:
    bound = bind_launch(_fill_kernel, (2,), torch.empty(100), 100, 0, COUNT=16)
    bound()
    names = []
    enter = triton.knobs.runtime.launch_enter_hook
    enter.add(lambda metadata: names.append(metadata.get()["name"]))
    bound()
    assert names == ["_fill_kernel"]
    for hook in list(enter.calls):
        enter.remove(hook)


@mock.patch.object(sharing, "OWN_LAUNCH", 0)
def check_a_bound_work_launches_what_the_launchers_do() -> None:
    """The launches agree in every step; only the addresses of temporaries may differ. A number in memory that is added
    to seeds is one more argument, the same in every step."""
    for spec in ("TopK", "DGC"):
        compressor, encodings, decodings = gckernels.from_spec(spec), [], []
        for seed, numel in enumerate((5000, 1, 100_003)):
            payload = torch.empty(1, compressor.payload_nbytes(numel), dtype=torch.uint8)
            residual = torch.empty(compressor.traits.states * numel)
            encodings.append(Encoding(compressor, torch.empty(numel), residual, payload, seed, numel))
            decodings.append(Decoding(compressor, payload[None], torch.empty(numel), numel))
        added = torch.zeros(1, dtype=torch.int64)
        encodes, adding = (compressor.triton.bind_encodes(encodings, 1.0, each) for each in (None, added))
        decodes = compressor.triton.bind_decodes(decodings, 0.5, True)
        for _ in range(2):
            assert_same(launched(encodes), launched(partial(encode_all, encodings)), encodings)
            assert_same(launched(decodes), launched(partial(decode_all, decodings)), encodings)
        first = launched(adding)
        added += 7
        assert_same(launched(adding), first, encodings)
        assert any(each is added for *_, arguments in first for each in arguments)


def encode_all(units: list[Encoding]) -> None:
    for unit in units:
        unit.compressor.triton.encode(unit)


def decode_all(units: list[Decoding]) -> None:
    for unit in units:
        unit.compressor.triton.decode(unit, 0.5, True)


def assert_same(got: list[Any], want: list[Any], units: list[Encoding]) -> None:
    fixed = {each.untyped_storage().data_ptr() for unit in units for each in (unit.grad, unit.residual, unit.payload)}
    assert [each[:3] for each in got] == [each[:3] for each in want]
    for (*_, ours), (*_, theirs) in zip(got, want, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            if not isinstance(other, torch.Tensor):
                assert mine == other
            else:
                assert mine.dtype == other.dtype and mine.numel() == other.numel()
                assert mine.data_ptr() % 16 == other.data_ptr() % 16
                if other.untyped_storage().data_ptr() in fixed:
                    assert mine.data_ptr() == other.data_ptr()


if __name__ == "__main__":
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            check()
            print(name)
