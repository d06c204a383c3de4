"""The codes of a chunk: the reference and the C program have the same bytes, which hold every change and no more."""

from __future__ import annotations

import contextlib
import math
import re
import threading

import pytest
import torch

from gckernels.patches.format import host, reference
from gckernels.patches.format.errors import PatchError
from gckernels.patches.format.kinds import BF16, BYTES, E4M3, E5M2, FP16, KINDS, ElementKind, patterns_of
from patch_weights import trained

BOTH = pytest.mark.parametrize("form", [reference, host], ids=["reference", "host"])
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=["bf16", "fp16", "e4m3", "e5m2", "bytes"])


def drawn(kind: ElementKind, numel: int, share: float, steps: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Bits before and after: a share of them changed, by any steps, or by ``"few"``."""
    old = torch.randint(0, kind.patterns, (numel,))
    if steps == "few" and kind is BF16:
        old = patterns_of((torch.randn(numel) * 0.02).bfloat16().view(torch.int16))
    codes = torch.randint(0, kind.patterns, (numel,))
    if steps == "few":
        codes = (torch.rand(numel).pow(8) * 40).long()
    new = torch.where(torch.rand(numel) < share, kind.moved(old, codes), old)
    return old.to(kind.bits_dtype), new.to(kind.bits_dtype)


@EVERY_KIND
def test_every_step_leads_to_its_pattern(kind):
    """From some patterns to all others: the codes differ, and lead there."""
    everything = torch.arange(kind.patterns)
    for pattern in (0, 1, kind.patterns // 2 - 1, kind.patterns // 2, kind.patterns - 1):
        old, new = torch.full_like(everything, pattern), everything
        codes = kind.codes(old, new)[new != pattern]
        assert codes.unique().numel() == kind.patterns - 1 and codes.min() >= 0 and codes.max() < kind.patterns
        assert torch.equal(kind.moved(old[new != pattern], codes), new[new != pattern])


def test_neighbours_are_one_step_apart():
    values = torch.tensor([-1.0, -(2.0**-133), -0.0, 0.0, 2.0**-133, 1.0]).bfloat16()
    places = BF16.order(patterns_of(values.view(torch.int16)))
    assert places.tolist() == [-16257, -2, -1, 0, 1, 16256]


@EVERY_KIND
@pytest.mark.parametrize("steps", ["any", "few"])
def test_reference_and_host_agree(kind, steps):
    for numel in (1, 63, 65, 400):
        for share in (0.0, 0.01, 0.3, 0.58, 0.9):
            old, new = drawn(kind, numel, share, steps)
            expected, coded = reference.encode_changes(kind, old, new), host.encode_changes(kind, old, new)
            assert (expected is None) == (coded is None)
            if expected is not None and coded is not None:
                assert expected[0] == coded[0] and torch.equal(expected[1], coded[1])
                for form in (reference, host):
                    positions, values = form.decode_changes(kind, coded[0], old)
                    assert torch.equal(positions, coded[1]) and torch.equal(values, new[positions.long()])
            dense = reference.encode_dense(kind, new)
            assert dense == host.encode_dense(kind, new)
            assert torch.equal(reference.decode_dense(kind, dense, numel), new)
            assert torch.equal(host.decode_dense(kind, dense, numel), new)
            assert reference.digest_of(new, 2**40) == host.digest_of(new, 2**40)


@BOTH
@pytest.mark.parametrize("kind", [BF16, BYTES], ids=["bf16", "bytes"])
def test_changes_take_no_bytes_where_there_are_none(form, kind):
    bits = torch.zeros(100, dtype=kind.bits_dtype)
    data, positions = form.encode_changes(kind, bits, bits)
    assert data == b"" and positions.numel() == 0
    assert form.decode_changes(kind, b"", bits)[0].numel() == 0


@BOTH
def test_the_example_of_the_specification(form):
    lines = re.findall(r"^    ((?:[0-9A-F]{2} )+) {2,}", reference.__doc__, re.MULTILINE)
    old = torch.tensor([1, 1, 1, 0.5, 1, 1, 1, 1]).bfloat16().view(torch.int16)
    new = old + torch.tensor([0, 0, 1, -4, 0, 0, 0, 0], dtype=torch.int16)
    data, positions = form.encode_changes(BF16, old, new)
    assert data == bytes.fromhex("".join(lines)) and positions.tolist() == [2, 3]


def test_a_subset_takes_at_most_a_tenth_of_a_bit_more_than_it_must():
    numel = 200_000
    for share in (0.002, 0.01, 0.07, 0.5, 0.93, 0.995):
        members = (torch.rand(numel) < share).nonzero()[:, 0]
        count, fewer = members.numel(), min(members.numel(), numel - members.numel())
        ways = math.lgamma(numel + 1) - math.lgamma(count + 1) - math.lgamma(numel - count + 1)
        nbits = 8 * reference.write_subset(members, numel).numel()
        assert nbits < ways / math.log(2) + 0.13 * fewer + 32  # a tenth, and the deviation of what is drawn


def entropy_nbits(old: torch.Tensor, new: torch.Tensor) -> float:
    """The entropy of changed positions and of steps, given the exponents before, in bits."""
    before, after = patterns_of(old), patterns_of(new)
    classes, codes, differs, total = BF16.classes(before), BF16.codes(before, after), before != after, 0.0
    for each in classes[differs].unique():
        mine = classes == each
        steps = torch.bincount(codes[mine & differs])
        total += _entropy(torch.stack([(mine & differs).sum(), (mine & ~differs).sum()])) + _entropy(steps)
    return total


def _entropy(counts: torch.Tensor) -> float:
    counts = counts[counts > 0].double()
    return float((counts * (counts.sum() / counts).log2()).sum())


@pytest.mark.parametrize("rate", [2.3e-7, 5e-7, 1e-6, 3.3e-6])  # 0.5, 1, 2 and 5 % changed
def test_bits_per_change_are_near_the_entropy(rate):
    old, new = (each.view(torch.int16) for each in trained(2**20, rate, torch.Generator().manual_seed(0)))
    data, positions = host.encode_changes(BF16, old, new)
    assert 0.004 < positions.numel() / old.numel() < 0.06
    assert 8 * len(data) <= 1.15 * entropy_nbits(old, new)
    assert 8 * len(data) <= 8.3 * positions.numel()


@EVERY_KIND
def test_no_chunk_is_longer_than_its_elements(kind):
    for share in (0.3, 0.6, 0.62, 1.0):
        old, new = drawn(kind, 20_000, share, "any")
        coded = host.encode_changes(kind, old, new)
        data = coded[0] if coded else host.encode_dense(kind, new)
        assert len(data) <= 1 + old.numel() * kind.nbytes


def test_exponents_of_weights_take_three_bits():
    bits = trained(2**18, 0.0, torch.Generator().manual_seed(0))[0].view(torch.int16)
    assert 2 * bits.numel() / len(host.encode_dense(BF16, bits)) > 1.42


@EVERY_KIND
def test_damaged_bytes_are_refused_or_decoded_by_the_host_alike(kind):
    """Bytes with any error, in both programs: an error, or the same changes of elements that exist."""
    old, new = drawn(kind, 300, 0.2, "few")
    generator = torch.Generator().manual_seed(1)
    data, _ = host.encode_changes(kind, old, new)
    dense = host.encode_dense(kind, new)
    for number in range(200):
        damaged, whole = bytearray(data), bytearray(dense)
        for each in (damaged, whole):
            place = number % len(each) if number < 100 else int(torch.randint(0, len(each), (), generator=generator))
            each[place] ^= int(torch.randint(1, 256, (), generator=generator))
        if number % 3 == 0:
            damaged = damaged[: number % len(damaged)]
        outcomes = [_outcome(form.decode_changes, kind, bytes(damaged), old) for form in (reference, host)]
        assert outcomes[0] == outcomes[1]
        outcomes = [_outcome(form.decode_dense, kind, bytes(whole), 300) for form in (reference, host)]
        assert outcomes[0] == outcomes[1]


def _outcome(decode, kind, data, given):
    try:
        found = decode(kind, data, given)
    except PatchError:
        return "refused"
    if isinstance(found, torch.Tensor):
        return found.tolist()
    positions, values = found
    assert not positions.numel() or (positions[0] >= 0 and positions[-1] < given.numel())
    assert (positions.diff() > 0).all()
    return positions.tolist(), values.tolist()


def test_random_bytes_are_refused_or_decoded_by_the_host_alike():
    generator = torch.Generator().manual_seed(2)
    old = torch.randint(-300, 300, (200,), dtype=torch.int16, generator=generator)
    for number in range(300):
        length = int(torch.randint(1, 90, (), generator=generator))
        data = bytearray(torch.randint(0, 256, (length,), generator=generator).to(torch.uint8).tolist())
        data[:2] = (1 + number % 3).to_bytes(2, "little")[:length]
        for row in range(number % 3 + 1):
            if len(data) > 5 + 4 * row:
                data[3 + 4 * row], data[4 + 4 * row] = 0, data[4 + 4 * row] & 0xF0
                data[5 + 4 * row] = row // 2
        assert _outcome(reference.decode_changes, FP16, bytes(data), old) == _outcome(
            host.decode_changes, FP16, bytes(data), old
        )


def test_digests_add_up():
    bits = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    parts = host.digest_of(bits[:300], 5), host.digest_of(bits[300:], 305)
    assert sum(parts) % 2**64 == host.digest_of(bits, 5) == reference.digest_of(bits, 5)
    positions = torch.tensor([1, 4, 999], dtype=torch.int32)
    of_some = sum(host.digest_of(bits[at : at + 1], 5 + at) for at in positions.tolist()) % 2**64
    assert host.digest_at(positions, bits[positions.long()], 5) == of_some
    assert len({host.digest_of(bits[:1], first) for first in range(1000)}) == 1000


def test_fp8_kinds_have_the_exponents_of_their_types():
    for kind, dtype in ((E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)):
        values = torch.tensor([0.25, 0.5, 1.0, 1.25, 2.0]).to(dtype).view(torch.uint8)
        assert kind.classes(patterns_of(values)).diff().tolist() == [1, 1, 0, 1]


def test_weights_that_change_while_they_are_encoded_do_no_harm():
    """The publisher's copy is its own, but another thread may step the model; followers see it by the digest."""
    old = torch.randint(-30000, 30000, (2**18,), dtype=torch.int16)
    new, stop = old.clone(), threading.Event()

    def change() -> None:
        while not stop.is_set():
            new[::3].copy_(old[::3])
            new[::3] += 1

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(20):
            coded = host.encode_changes(BF16, old, new)
            assert coded is not None and len(coded[0]) < 2 * old.numel()
            positions, _ = host.decode_changes(BF16, coded[0], old)
            assert positions.numel() <= old.numel() // 3 + 1
            with contextlib.suppress(PatchError):
                positions, _ = host.decode_changes(BF16, coded[0], new)
                assert (positions.diff() > 0).all()
    finally:
        stop.set()
        thread.join()
