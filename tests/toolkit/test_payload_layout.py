"""The layout of payloads: the places of the fields, and the header before them."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from gckernels.toolkit.payload import HEADER_NBYTES, STATUS_OK, PayloadLayout, round_up, status_ok

DTYPES = [torch.uint8, torch.bfloat16, torch.float16, torch.int32, torch.float32]
FIELDS = st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 100)), max_size=5)


def layout_of(fields) -> PayloadLayout:
    return PayloadLayout.of(*((f"field{i}", dtype, count) for i, (dtype, count) in enumerate(fields)))


def test_docstring_example():
    layout = PayloadLayout.of(("scales", torch.float32, 3), ("codes", torch.uint8, 21))
    assert (layout["scales"].offset, layout["codes"].offset, layout.nbytes) == (16, 32, 64)
    assert layout.new()[:4].numpy().tobytes() == b"GKC1"


@given(st.integers(0, 2**40), st.sampled_from([1, 2, 16, 48]))
def test_round_up(value, multiple):
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert 0 <= rounded - value < multiple


@given(FIELDS)
def test_fields_are_aligned_and_do_not_overlap(fields):
    layout = layout_of(fields)
    end = HEADER_NBYTES
    for field, (dtype, count) in zip(layout.fields, fields, strict=True):
        assert field.offset == end  # no gaps except padding
        assert field.offset % 16 == 0
        assert field.nbytes % 16 == 0
        assert 0 <= field.nbytes - count * dtype.itemsize < 16
        assert layout[field.name] is field
        end = field.offset + field.nbytes
    assert layout.nbytes == end


@given(FIELDS, st.integers(1, 3), st.data())
def test_views_see_their_field_and_nothing_else(fields, rows, data):
    """This holds for every row and dtype; a view has no padding."""
    layout = layout_of(fields)
    payload = torch.zeros(rows, layout.nbytes, dtype=torch.uint8)
    for field in layout.fields:
        view = layout.view(payload, field.name)
        assert view.shape == (rows, field.count)
        assert view.dtype == field.dtype
        view.view(torch.uint8).fill_(0xFF)
        touched = payload.nonzero()[:, 1]
        if field.count:
            assert int(touched.min()) == field.offset
            assert int(touched.max()) == field.offset + field.count * field.dtype.itemsize - 1
        payload.zero_()


@given(FIELDS)
def test_new_has_a_good_header_and_zeros(fields):
    payload = layout_of(fields).new()
    assert payload[:4].view(torch.int32).item() == STATUS_OK
    assert not payload[4:].any()
    assert status_ok(payload)


@pytest.mark.parametrize("shape", [(16,), (3, 32), (2, 3, 64)])
def test_headers_of_many(shape):
    payloads = torch.full(shape, 0xFF, dtype=torch.uint8)
    assert not status_ok(payloads).any()
    payloads[..., :4].view(torch.int32)[..., 0] = STATUS_OK
    assert status_ok(payloads).all()
    assert status_ok(payloads).shape == shape[:-1]


@pytest.mark.parametrize("bit", range(32))
def test_every_bit_of_the_status_word_counts(bit):
    payload = PayloadLayout.of(("codes", torch.uint8, 5)).new()
    payload[bit // 8] ^= 1 << bit % 8
    assert not status_ok(payload)
