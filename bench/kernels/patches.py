"""Patches of weights beside the encodings that public code sends: bits per changed element, and GB/s of weights.

    python -m bench.kernels.patches

The weights are like those of a language model: bf16 copies of masters drawn from N(0, 0.02), which move by half the
learning rate times N(0, 1) between two versions. The arms are what others send, re-made from their descriptions:

- ``int32_bf16``: a 32-bit index and the new value (verl, open-rl);
- ``gap16_bf16``: 16-bit gaps between indices, with a filler where a gap is longer, and the new value (slime);
- ``gap16_deflated``: the same, gaps and values apart, behind zstd at level 1, or zlib where Python has no zstd;
- ``xor_deflated``: old bits xor new bits of all elements, behind the same.

``entropy`` is that of changed positions and steps, given the exponents before. ``encode`` makes the object of a version
from two sets of weights, its hash included; ``apply`` checks and decodes an object and writes the changes, with the
digest that a follower keeps; ``digest`` reads all weights; ``copy`` is ``torch.Tensor.copy_`` of all weights. These
take turns on one thread. Results are GB/s of the dense weights per second of processor time, the best of all rounds:
other programs on the machine only make them lower. Writes ``bench/results/cpu/patches.csv``.
"""

from __future__ import annotations

import functools
import importlib
import time
import zlib
from collections.abc import Callable

import torch

import gckernels
from bench.lib.rounds import take_turns
from bench.lib.sweep import Row, Sweep
from gckernels.patches.format import changes
from gckernels.patches.format.elements import Elements, described, elements_of
from gckernels.patches.format.kinds import BF16, patterns_of
from gckernels.patches.format.objects import opened

NUMEL, ROUNDS = 2**23, 15
RATES = (1e-7, 2.3e-7, 5e-7, 1e-6, 3.3e-6, 1e-5, 1e-4)


def deflate() -> tuple[str, Callable[[bytes], bytes]]:
    """The name of the compressor behind the other arms, and the compressor at its fastest level."""
    for name, make in (
        ("compression.zstd", lambda m: m.compress),
        ("zstandard", lambda m: m.ZstdCompressor(1).compress),
    ):
        try:
            return "zstd", make(importlib.import_module(name))
        except ImportError:
            continue
    return "zlib", lambda data: zlib.compress(data, 1)


def other_nbytes(old: torch.Tensor, new: torch.Tensor) -> dict[str, int]:
    """The bytes of each of the other encodings."""
    deflated = deflate()[1]
    places = (old != new).nonzero()[:, 0]
    gaps = places.diff(prepend=places.new_tensor([-1])) - 1
    fillers = int((gaps // 65535).sum())
    gaps16, values = (gaps % 65535).to(torch.uint16).numpy().tobytes(), new[places].numpy().tobytes()
    return {
        "int32_bf16": 6 * places.numel(),
        "gap16_bf16": 4 * places.numel() + 2 * fillers,
        "gap16_deflated": len(deflated(gaps16)) + len(deflated(values)),
        "xor_deflated": len(deflated((old ^ new).numpy().tobytes())),
    }


def entropy_nbits(old: torch.Tensor, new: torch.Tensor) -> float:
    """The entropy of positions and steps given the exponents before, in bits."""
    before, after = patterns_of(old), patterns_of(new)
    classes, codes, differs, total = BF16.classes(before), BF16.codes(before, after), before != after, 0.0
    for each in torch.unique(classes[differs]).tolist():
        mine = classes == each
        count = int((mine & differs).sum())
        for counts in (torch.tensor([count, int(mine.sum()) - count]), torch.bincount(codes[mine & differs])):
            some = counts[counts > 0].double()
            total += float((some * (some.sum() / some).log2()).sum())
    return total


def processor_s(work: Callable[[], object]) -> float:
    """The seconds of processor time that a call takes."""
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


def _elements(tensors: dict[str, torch.Tensor]) -> Elements:
    return elements_of("bench", described("bench", tensors), tensors.__getitem__)


def measured(rate: float) -> list[Row]:
    """The row of one learning rate."""
    generator = torch.Generator().manual_seed(0)
    masters = torch.randn(NUMEL, generator=generator) * 0.02
    old = masters.bfloat16()
    new = (masters + rate / 2 * torch.randn(NUMEL, generator=generator)).bfloat16()
    replica, one, other = old.clone(), _elements({"w": old}), _elements({"w": new})
    follower, before = _elements({"w": replica}), one.digest()

    def encode() -> bytes:
        return changes.encoded(one, other, 1, 0, before)[0].sealed(None)

    data = encode()

    def apply() -> None:
        for change in changes.decoded([opened(data, None, one.layout, "")], follower):
            change.write()

    def applied() -> float:
        replica.copy_(old)
        return processor_s(apply)

    timed = {
        "encode": lambda: processor_s(encode),
        "apply": applied,
        "digest": lambda: processor_s(one.digest),
        "copy": lambda: processor_s(lambda: replica.copy_(new)),
    }
    gckernels.set_num_threads(1)
    times = take_turns(timed, ROUNDS, 2)
    gckernels.set_num_threads(None)
    replica.copy_(old)
    apply()
    assert torch.equal(replica.view(torch.int16), new.view(torch.int16))

    bits = old.view(torch.int16), new.view(torch.int16)
    count = int((bits[0] != bits[1]).sum())
    row: Row = {"rate": f"{rate:g}", "changed": f"{count / NUMEL:.5f}"}
    row |= {"entropy": f"{entropy_nbits(*bits) / count:.2f}", "patch": f"{8 * len(data) / count:.2f}"}
    row |= {name: f"{8 * nbytes / count:.1f}" for name, nbytes in other_nbytes(*bits).items()}
    row |= {"deflated_by": deflate()[0], "dense_over_patch": f"{2 * NUMEL / len(data):.1f}"}
    return [row | {f"{name}_gb_per_s": f"{2e-9 * NUMEL / min(each):.2f}" for name, each in times.items()}]


def cases(device: torch.device) -> dict[str, Callable[[], list[Row]]]:
    """The measurements of all rates, by name."""
    return {f"{rate:g}": functools.partial(measured, rate) for rate in RATES}


SWEEP = Sweep("patches", ("rate",), cases, case_s=5.0)

if __name__ == "__main__":
    torch.set_num_threads(1)
    SWEEP.main(__doc__)
