"""Seeds, scales, sizes and shapes: valid values are accepted, and the error for any other value names the argument."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import gckernels
from gckernels import QSGD, Cast16, TopK

NUMEL = 1000
GRAD = torch.randn(NUMEL)
PAYLOAD = gckernels.encode(TopK(), GRAD)
EMPTY = torch.empty(Cast16().payload_nbytes(NUMEL), dtype=torch.uint8)

NO_INTEGERS = [1.0, 1.5, "1", None, True, [1], torch.zeros(2, dtype=torch.int64), np.zeros(2, np.int64)]
NO_NUMBERS = ["1", None, True, [1.0], {}]
NO_TENSORS = [None, [1.0], np.zeros(NUMEL, np.float32), 3]

Call = Callable[[Any], object]
CALLS: list[tuple[str, str, Call, list[Any], list[Any]]] = [
    # the function, the argument, the call, values of the wrong type, wrong values of the right type
    ("Cast16.encode", "seed", lambda v: Cast16().encode(GRAD, None, EMPTY, v), NO_INTEGERS, [2**64, -(2**63) - 1]),
    ("QSGD.encode", "seed", lambda v: gckernels.encode(QSGD(), GRAD, seed=v), NO_INTEGERS, [10**30, -(10**30)]),
    (
        "TopK.recode",
        "seed",
        lambda v: gckernels.recode(TopK(), PAYLOAD[None], None, NUMEL, seed=v),
        NO_INTEGERS,
        [2**64, -(2**63) - 1],
    ),
    ("Cast16.encode", "scale", lambda v: gckernels.encode(Cast16(), GRAD, scale=v), NO_NUMBERS, []),
    ("TopK.decode", "scale", lambda v: gckernels.decode(TopK(), PAYLOAD, NUMEL, scale=v), NO_NUMBERS, []),
    ("TopK.recode", "scale", lambda v: gckernels.recode(TopK(), PAYLOAD[None], None, NUMEL, scale=v), NO_NUMBERS, []),
    ("TopK.encode", "chunks", lambda v: gckernels.encode(TopK(), GRAD, chunks=v), NO_INTEGERS, [0, -1, 10**30]),
    (
        "TopK.decode",
        "chunks",
        lambda v: gckernels.decode(TopK(), PAYLOAD, NUMEL, chunks=v),
        NO_INTEGERS,
        [0, -1, 10**30],
    ),
    (
        "TopK.encode",
        "size",
        lambda v: gckernels.encode(TopK(), GRAD, size=v),
        [each for each in NO_INTEGERS if each is not None],
        [-1, 999, 10**30],
    ),
    (
        "TopK.decode",
        "size",
        lambda v: TopK().decode(PAYLOAD, GRAD.clone(), size=v),
        [each for each in NO_INTEGERS if each is not None],
        [-1, 999, 10**30],
    ),
    ("TopK.recode", "numel", lambda v: gckernels.recode(TopK(), PAYLOAD[None], None, v), NO_INTEGERS, [-1, 10**30]),
    (
        "TopK.recode",
        "numel",
        lambda v: TopK().recode(PAYLOAD[None], None, PAYLOAD.clone(), v),
        NO_INTEGERS,
        [-1, 10**30],
    ),
    (
        "TopK.decode",
        "shape",
        lambda v: gckernels.decode(TopK(), PAYLOAD, v),
        ["1000", 1000.0, (10.0, 100.0), [[1000]], {1000}, True, (None,)],
        [-5, (10, -100), (10**30,), (2**40, 2**40)],
    ),
    (
        "TopK.decode",
        "out_dtype",
        lambda v: gckernels.decode(TopK(), PAYLOAD, NUMEL, out_dtype=v),
        [torch.float64, torch.int32],
        ["float99", 3, float],
    ),
    ("TopK.decode", "accumulate", lambda v: TopK().decode(PAYLOAD, GRAD.clone(), 1.0, v), ["x", None, 1, [True]], []),
    ("Cast16.encode", "grad", lambda v: Cast16().encode(v, None, EMPTY), NO_TENSORS, []),
    ("Cast16.encode", "residual", lambda v: Cast16().encode(GRAD, v, EMPTY), NO_TENSORS[1:], []),
    ("Cast16.encode", "payload", lambda v: Cast16().encode(GRAD, None, v), NO_TENSORS, []),
    ("TopK.encode", "grad", lambda v: gckernels.encode(TopK(), v), NO_TENSORS, []),
    ("TopK.encode", "residual", lambda v: gckernels.encode(TopK(), GRAD, v), NO_TENSORS[1:], []),
    ("TopK.decode", "payloads", lambda v: gckernels.decode(TopK(), v, NUMEL), NO_TENSORS, []),
    ("TopK.decode", "out", lambda v: gckernels.decode(TopK(), PAYLOAD, out=v), NO_TENSORS[1:], []),
    ("TopK.decode", "payloads", lambda v: TopK().decode(v, GRAD.clone()), NO_TENSORS, []),
    ("TopK.decode", "out", lambda v: TopK().decode(PAYLOAD, v), NO_TENSORS, []),
    ("TopK.recode", "payloads", lambda v: gckernels.recode(TopK(), v, None, NUMEL), NO_TENSORS, []),
    ("TopK.recode", "payload", lambda v: TopK().recode(PAYLOAD[None], None, v, NUMEL), NO_TENSORS, []),
]


@pytest.mark.parametrize(("where", "argument", "call", "types", "values"), CALLS)
def test_the_error_names_the_argument(where, argument, call, types, values):
    for error, wrong in ((TypeError, types), (ValueError, values)):
        for value in wrong:
            with pytest.raises(error, match=rf"^{where}: .*\b{argument}\b") as caught:
                call(value)
            assert len(str(caught.value)) < 250


@pytest.mark.parametrize("seed", [0, 3, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63)])
def test_seeds_have_64_bits_with_or_without_a_sign(seed):
    bits = seed % 2**64
    payload = gckernels.encode(QSGD(), GRAD, seed=seed)
    assert torch.equal(payload, gckernels.encode(QSGD(), GRAD, seed=bits))
    assert torch.equal(payload, gckernels.encode(QSGD(), GRAD, seed=bits - 2**64 if bits >= 2**63 else bits))
    by_method = torch.empty_like(payload)
    QSGD().encode(GRAD, None, by_method, seed)
    assert torch.equal(by_method, payload)


@pytest.mark.parametrize("like", [np.int64, np.int32, torch.tensor, int])
def test_integers_of_other_kinds_are_taken(like):
    assert torch.equal(gckernels.encode(QSGD(), GRAD, seed=like(7)), gckernels.encode(QSGD(), GRAD, seed=7))
    chunked = gckernels.encode(TopK(), GRAD, chunks=like(2), size=like(512))
    assert torch.equal(chunked, gckernels.encode(TopK(), GRAD, chunks=2))
    decoded = gckernels.decode(TopK(), PAYLOAD, (like(10), like(100)))
    assert torch.equal(decoded, gckernels.decode(TopK(), PAYLOAD, NUMEL).view(10, 100))


@pytest.mark.parametrize("like", [np.float32, np.float64, torch.tensor, int, float])
def test_numbers_of_other_kinds_are_taken(like):
    assert torch.equal(
        gckernels.decode(TopK(), PAYLOAD, NUMEL, scale=like(2)), 2 * gckernels.decode(TopK(), PAYLOAD, NUMEL)
    )


@pytest.mark.parametrize("name", ["bf16", "bfloat16", torch.bfloat16])
def test_the_dtype_of_the_result_goes_by_its_name(name):
    assert gckernels.decode(TopK(), PAYLOAD, NUMEL, out_dtype=name).dtype == torch.bfloat16
