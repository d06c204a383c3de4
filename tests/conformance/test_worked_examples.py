"""The examples worked out by hand in the modules' docstrings, byte by byte."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from configurations import OURS

import gckernels
from helpers import HOST_PARAM, KERNEL_PARAM, REFERENCE_PARAM, decode, encode, zero_residual


@dataclass(frozen=True)
class Example:
    """At most 16 values and what they become; ``payload`` is hexadecimal, one string per 16 bytes."""

    spec: str
    values: tuple[float, ...]
    payload: tuple[str, ...]
    decoded: tuple[float, ...]
    residual: tuple[float, ...] | None = None  # by default what decoding does not give back; with all states


STATUS = "47 4B 43 31 00 00 00 00 00 00 00 00 00 00 00 00"  # "GKC1"
EXAMPLES = [
    Example(
        "BlockFP8",
        (-896.0, 2.0, 0.0625, 0.0),
        (
            STATUS,
            "00 00 00 40 00 00 00 00 00 00 00 00 00 00 00 00",  # scale 2
            "FE 38 10 00 00 00 00 00 00 00 00 00 00 00 00 00",  # -448, 1, 2**-5, 0
        ),
        (-896.0, 2.0, 0.0625, 0.0),
    ),
    Example(
        "BlockFP8(format='e5m2')",
        (57344.0, -1.125, 2.0**-17, 0.0),
        (
            STATUS,
            "00 00 80 3F 00 00 00 00 00 00 00 00 00 00 00 00",  # scale 1
            "7B BC 00 00 00 00 00 00 00 00 00 00 00 00 00 00",  # the largest; -1.125 and 2**-17 are ties, to even ones
        ),
        (57344.0, -1.0, 0.0, 0.0),
    ),
    Example(
        "BlockQuant(bits=4)",
        (7.0, -3.6, 0.5, 0.0),
        (
            STATUS,
            "00 00 80 3F 00 00 00 00 00 00 00 00 00 00 00 00",  # scale 1
            "4F 88 00 00 00 00 00 00 00 00 00 00 00 00 00 00",  # 7 + 8, -4 + 8, 0 + 8, 0 + 8
        ),
        (7.0, -4.0, 0.0, 0.0),
    ),
    Example(
        "BlockQuant(scale_dtype='bfloat16')",
        (-254.0, 63.0, 1.0),
        (
            STATUS,
            "00 40 00 00 00 00 00 00 00 00 00 00 00 00 00 00",  # scale 2 in bf16
            "01 A0 80 00 00 00 00 00 00 00 00 00 00 00 00 00",  # -127, 31.5 to the even 32, 0.5 to 0; each + 128
        ),
        (-254.0, 64.0, 0.0),
    ),
    Example(
        "Cast16",
        (1.0, -2.5, 1.001953125),
        ("80 3F 20 C0 80 3F 00 00 00 00 00 00 00 00 00 00",),
        (1.0, -2.5, 1.0),
    ),
    Example(
        "Cast16(dtype='float16')",
        (1.0, -2.5, 1.00048828125),  # halfway between 1 and 1 + 2**-10: to the even one
        ("00 3C 00 C1 00 3C 00 00 00 00 00 00 00 00 00 00",),
        (1.0, -2.5, 1.0),
    ),
    Example(
        "ChunkTopK(chunk=64, k=8, value_bits=4)",
        (0.0, -7.0, 0.5, 0.0, 3.0, 0.0, 0.0, 0.0, 1.0, 2.25),
        (
            STATUS,
            "00 00 80 3F 00 00 00 00 00 00 00 00 00 00 00 00",  # scale 1
            "00 10 00 02 30 00 04 50 00 08 90 00 00 00 00 00",  # indices 0 1 2 3 4 5 8 9, 12 bits each
            "18 88 8B A9 00 00 00 00 00 00 00 00 00 00 00 00",  # 0 -7 0 0 3 0 1 2, each + 8
        ),
        (0.0, -7.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 1.0, 2.0),
    ),
    Example(
        "DGC(ratio=0.5)",  # from u = v = 0, which both become the values
        (0.0, -3.0, 1.0, 0.5, 1.0, 1.0),
        (
            STATUS,
            "4A 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",  # 1, 2, 4: four reach 1, and one is trimmed
            "00 00 40 C0 00 00 80 3F 00 00 80 3F 00 00 00 00",  # -3, 1, 1
        ),
        (0.0, -3.0, 1.0, 0.0, 1.0, 0.0),
        residual=(0.0, 0.0, 0.0, 0.5, 0.0, 1.0) * 2,
    ),
    Example(
        "EFSignSGD",
        (3.0, -1.0, 0.0, -4.0),
        (
            STATUS,
            "00 00 00 40 00 00 00 00 00 00 00 00 00 00 00 00",  # mean magnitude 2
            "05 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",  # + - + -
        ),
        (2.0, -2.0, 2.0, -2.0),
    ),
    Example(
        "GradDrop(ratio=0.5)",
        (0.0, -3.0, 1.0, 0.5, 1.0, 1.0),
        (
            STATUS,
            "4A 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",  # 1, 2, 4: of four that reach 1, which has rank 3
            "00 00 40 C0 00 00 80 3F 00 00 80 3F 00 00 00 00",  # -3, 1, 1
        ),
        (0.0, -3.0, 1.0, 0.0, 1.0, 0.0),
    ),
    Example(
        "Identity",
        (1.0, -2.5),
        ("00 00 80 3F 00 00 20 C0 00 00 00 00 00 00 00 00",),
        (1.0, -2.5),
    ),
    Example(
        "LinearQuant(bits=2)",
        (-1.0, 2.0, 0.375, 0.75),
        (
            STATUS,
            "00 00 80 BF 00 00 00 40 00 00 00 00 00 00 00 00",  # minimum -1, maximum 2
            "9C 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",  # levels 0, 3, 1.375 to 1, 1.75 to 2
        ),
        (-1.0, 2.0, 0.0, 1.0),
    ),
    Example(
        "MSTopK(ratio=0.5)",
        (1.0625, 0.0, -3.0, 1.09375, 0.5, 1.0),
        (
            STATUS,
            "29 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",  # 0, 2, 3: -3, and two of those from 1 to 1.125
            "00 00 88 3F 00 00 40 C0 00 00 8C 3F 00 00 00 00",  # 1.0625, -3, 1.09375
        ),
        (1.0625, 0.0, -3.0, 1.09375, 0.0, 0.0),
    ),
    Example(
        "Natural",
        (1.0, -0.25, 0.0, 2.0**31),
        (STATUS, "5F DD 00 7E 00 00 00 00 00 00 00 00 00 00 00 00"),  # exponents + 95: 95, 93, none, 126
        (1.0, -0.25, 0.0, 2.0**31),
    ),
    Example(
        "OneBit",
        (3.0, -1.0, 0.0, -4.0),
        (
            STATUS,
            "00 00 C0 3F 00 00 20 C0 00 00 00 00 00 00 00 00",  # means 1.5 and -2.5
            "05 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",  # + - + -
        ),
        (1.5, -2.5, 1.5, -2.5),
    ),
    Example(
        "QSGD(levels=4)",
        (6.0, -4.0, 2.0, -2.0, 2.0, 0.0),
        (
            STATUS,
            "00 00 00 41 00 00 00 00 00 00 00 00 00 00 00 00",  # norm 8
            "A3 91 01 00 00 00 00 00 00 00 00 00 00 00 00 00",  # levels 3, 2 and 1, + 8 where negative
        ),
        (6.0, -4.0, 2.0, -2.0, 2.0, 0.0),
    ),
    Example(
        "RandomK(ratio=0.5)",
        (1.0, -2.0, 0.5, 3.0),
        (
            "00 00 80 3F 00 00 00 00 00 00 00 00 00 00 00 00",  # one payload, seed 0
            "00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",
            "00 00 80 3F 00 00 40 40 00 00 00 00 00 00 00 00",  # 1, 3
        ),
        (1.0, 0.0, 0.0, 3.0),
    ),
    Example(
        "SigNUM(beta=0.5)",  # from a momentum of 0, which becomes half of the values
        (3.0, -1.0, -0.5, 0.25),
        (STATUS, "00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", "09 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00"),
        (1.0, -1.0, -1.0, 1.0),
        residual=(1.5, -0.5, -0.25, 0.125),
    ),
    Example(
        "SignSGD",
        (3.0, -1.0, -0.5, 0.25),
        (STATUS, "00 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00", "09 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00"),
        (1.0, -1.0, -1.0, 1.0),
    ),
    Example(
        "TBQ(tau=0.5)",
        (0.75, -0.5, 0.25, 2.0),
        (STATUS, "92 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00"),  # codes 2 0 1 2
        (0.5, -0.5, 0.0, 0.5),
    ),
    Example(
        "TernGrad",
        (2.0, -2.0, 0.0, 2.0),
        (
            STATUS,
            "00 00 00 40 00 00 00 00 00 00 00 00 00 00 00 00",  # largest magnitude 2
            "92 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",  # codes 2 0 1 2
        ),
        (2.0, -2.0, 0.0, 2.0),
    ),
    Example(
        "Threshold(tau=0.5, ratio=0.5)",
        (0.0, -3.0, 1.0, 0.5, 0.25, 0.0),
        (
            STATUS,
            "0A 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",  # 1, 2, with room for 3
            "00 00 40 C0 00 00 80 3F 00 00 00 00 00 00 00 00",  # -3, 1
        ),
        (0.0, -3.0, 1.0, 0.0, 0.0, 0.0),
    ),
    Example(
        "TopK(ratio=0.5)",
        (0.0, -3.0, 1.0, 0.5, 1.0, 0.0),
        (
            STATUS,
            "4A 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",  # bits 0 + 1, 1 + 2, 2 + 4
            "00 00 40 C0 00 00 80 3F 00 00 80 3F 00 00 00 00",  # -3, 1, 1
        ),
        (0.0, -3.0, 1.0, 0.0, 1.0, 0.0),
    ),
    Example(
        "TopK(ratio=0.25, value_bits=4)",
        (0.0, -7.0, 0.5, 0.0, 3.0, 0.0, 0.0, 0.0, 1.0, 2.25, 0.0, 0.0),
        (
            STATUS,
            "49 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",  # bits 0 + 0, 1 + 2, 2 + 4: groups of two
            "05 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00",  # 1, 0, 1: indices 1, 4, 9
            "00 00 80 3F 00 00 00 00 00 00 00 00 00 00 00 00",  # scale 1
            "B1 0A 00 00 00 00 00 00 00 00 00 00 00 00 00 00",  # -7, 3, 2, each + 8
        ),
        (0.0, -7.0, 0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0),
    ),
]


@pytest.mark.parametrize("name", sorted(OURS))
def test_every_compressor_has_an_example(name):
    assert any(example.spec.partition("(")[0] == name for example in EXAMPLES), (
        f"work an example of {name} out by hand and add it here"
    )


@pytest.mark.parametrize("implementation", [REFERENCE_PARAM, HOST_PARAM, KERNEL_PARAM])
@pytest.mark.parametrize("example", EXAMPLES, ids=[example.spec for example in EXAMPLES])
def test_example(example, implementation):
    assert len(example.values) <= 16
    compressor = gckernels.from_spec(example.spec)
    values, decoded = torch.tensor(example.values), torch.tensor(example.decoded)
    payload, residual = encode(implementation, compressor, values, zero_residual(compressor, values.numel()))
    assert payload[0].numpy().tobytes().hex(" ").upper() == " ".join(example.payload)
    assert decode(implementation, compressor, payload, torch.empty_like(values)).tolist() == decoded.tolist()
    left = values - decoded if example.residual is None else torch.tensor(example.residual)
    assert residual.tolist() == left.tolist()
