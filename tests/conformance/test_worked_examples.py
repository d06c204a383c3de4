"""The examples worked out by hand in the modules' docstrings, byte by byte."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import gckernels
from gckernels import COMPRESSORS
from helpers import HOST_PARAM, KERNEL_PARAM, REFERENCE_PARAM, decode, encode


@dataclass(frozen=True)
class Example:
    """At most 16 values and what they become; ``payload`` is hexadecimal, one string per 16 bytes."""

    spec: str
    values: tuple[float, ...]
    payload: tuple[str, ...]
    decoded: tuple[float, ...]


STATUS = "47 4B 43 31 00 00 00 00 00 00 00 00 00 00 00 00"  # "GKC1"
EXAMPLES = [
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
        "Identity",
        (1.0, -2.5),
        ("00 00 80 3F 00 00 20 C0 00 00 00 00 00 00 00 00",),
        (1.0, -2.5),
    ),
]


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
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
    payload, residual = encode(implementation, compressor, values, torch.zeros_like(values))
    assert payload[0].numpy().tobytes().hex(" ").upper() == " ".join(example.payload)
    assert decode(implementation, compressor, payload, torch.empty_like(values)).tolist() == decoded.tolist()
    assert residual.tolist() == (values - decoded).tolist()
