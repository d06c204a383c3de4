"""The codes of a chunk and the digest, specified in plain torch.

A *chunk* is up to 2**20 elements in a row, of one kind. It is sent in one of two forms: its changes, or all of it.

**Changes.** The *class* of an element is the exponent that it had before, which the receiver knows. Whether a weight
changes, and by how many steps, depends on the spacing of numbers at its exponent, so within a class the changes are
spread evenly. The changed elements of a class are a subset of its elements, which are numbered in their order. Fields,
little-endian, without gaps:

- the number of rows, 16 bits; a chunk in which nothing has changed has no byte at all;
- the rows, 32 bits each: class in bits 24 to 31, ``width`` from 0 to 15 in bits 20 to 23, and in bits 0 to 19 the
  number of entries less one. Classes ascend. A second row of a class holds the *escapes* of the row before it, a subset
  of that row's entries; a third row those of the second;
- for each row the subset, then ``width`` bits for each entry (``gckernels/toolkit/bitpack.py``): the lowest bits of its
  code. The code is the step in the order of patterns: +1 is 0, -1 is 1, +2 is 2, and so on
  (``patches/format/kinds.py``). The bits above ``width``, less one, are the code of the escape; entries without an
  escape have zeros there.

**A subset** of ``count`` of ``numel`` numbers is written as the smaller one of itself and of what it leaves out. The
gap to each member from the one before it, less one, is cut in two: the ``low`` lowest bits of all gaps come first,
packed, then a string of bits (lowest first) with as many zeros as the upper part says and a one for each gap; it ends
with the byte of the last one. ``low`` follows from the density (the function ``low_bits``). This is the code of Rice
(1979), which for evenly spread members takes at most 0.1 bits per member more than the least that is possible, where
the code of the sparsifiers' entries takes half a bit.

**All of a chunk.** One byte ``width``. With 0 the patterns follow as they are. Otherwise: a table of ``2**width - 1``
classes, the most frequent ones; for each element a code of ``width`` bits, which is a place in the table, or the last
code for any other class; the sign and mantissa of each element, packed; a byte with the class for each last code.

**The digest** of elements is the sum modulo 2**64 of a mix of each element's number in the layout and its pattern. A
patch changes it by what the changed elements add and no longer add, and digests of shards add up.

Example: eight bf16 elements, ``[1, 1, 1, 0.5, 1, 1, 1, 1]``, of which numbers 2 and 3 change, by one step up and by
four down, with classes 127 and 126::

    02 00          two rows
    00 00 30 7E    class 126, 3 bits, 1 entry
    00 00 00 7F    class 127, 0 bits, 1 entry
                   1 of 1: what is left out is empty
    07             the code 7: four steps down
    02             the third of 7: the gap is 2, its two low bits
    01             the string 1; and no bit of code: 0, one step up
"""

from __future__ import annotations

import torch

from gckernels.toolkit import bitpack

from .errors import PatchError
from .kinds import ElementKind, patterns_of

CHUNK = 2**20
"""The largest number of elements of a chunk. Smaller chunks repeat their tables more often: 1.5 % of the bytes at 1 %
changed. Larger ones leave the cache."""
MAX_LOW = 16
"""The largest number of low bits of a gap."""
MAX_WIDTH = 15
ROW_BITS = 32
DENSE = (3, 5)  # above this share of changed elements a chunk is sent as a whole
_MASK = 2**64 - 1


# ---------------------------------------------------------------- changes


def encode_changes(kind: ElementKind, old: torch.Tensor, new: torch.Tensor) -> tuple[bytes, torch.Tensor] | None:
    """``(data, positions)`` of the changes of a chunk, or ``None`` if more than 60 % of its elements have changed.

    Args:
        kind: the kind of the elements.
        old: bits before, ``[numel]``, in the kind's ``bits_dtype``.
        new: bits after.

    Returns:
        The bytes of the changes, and the changed positions, int32, ascending.
    """
    before, after = patterns_of(old), patterns_of(new)
    positions = (before != after).nonzero()[:, 0]
    if positions.numel() * DENSE[1] > before.numel() * DENSE[0]:
        return None
    classes = kind.classes(before)
    rows, bodies = [], []
    for each in torch.unique(classes[positions]).tolist():
        members = (classes == each).nonzero()[:, 0]
        chosen = positions[classes[positions] == each]
        subset, numel = torch.searchsorted(members, chosen), members.numel()
        codes, is_first = kind.codes(before[chosen], after[chosen]), True
        while codes.numel():
            width, count = width_of(codes, is_first), codes.numel()
            rows.append(each << 24 | width << 20 | count - 1)
            bodies += [write_subset(subset, numel), bitpack.pack(codes & (2**width - 1), width)]
            subset, numel = (codes >> width).nonzero()[:, 0], count
            codes, is_first = (codes[subset] >> width) - 1, False
    data = b"".join(row.to_bytes(4, "little") for row in rows) + b"".join(_bytes(body) for body in bodies)
    return (len(rows).to_bytes(2, "little") + data if rows else b""), positions.to(torch.int32)


def decode_changes(kind: ElementKind, data: bytes, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``(positions, values)`` of the changes of a chunk: int32, ascending, and bits.

    Args:
        kind: the kind of the elements.
        data: bytes of :func:`encode_changes`, of which no bit is trusted.
        old: bits before, ``[numel]``.

    Raises:
        PatchError: they are not changes of these elements.
    """
    if not data:
        return torch.empty(0, dtype=torch.int32, device="cpu"), torch.empty(0, dtype=kind.bits_dtype, device="cpu")
    before, payload = patterns_of(old), torch.frombuffer(bytearray(data), dtype=torch.uint8)
    classes, found = kind.classes(before), []
    at = rows_end = 2 + 4 * int.from_bytes(data[:2], "little")
    _require(len(data) >= at >= 6, "the rows do not fit")
    which = codes = before[:0]
    last, used = -1, 0
    for start in range(2, rows_end, 4):
        row = int.from_bytes(data[start : start + 4], "little")
        each, width, count = row >> 24, row >> 20 & 15, (row & 0xFFFFF) + 1
        _require(each >= last, "classes do not ascend")
        if each > last:
            members, used, last = (classes == each).nonzero()[:, 0], 0, each
            which, at = read_subset(payload, at, members.numel(), count)
            codes = torch.zeros_like(which)
            found.append((members[which], codes))
            which = torch.arange(count, dtype=torch.int64, device="cpu")
        else:
            subset, at = read_subset(payload, at, which.numel(), count)
            which = which[subset]
            codes[which] += 1 << used
        nbytes = bitpack.packed_nbytes(count, width)
        _require(at + nbytes <= len(data) and used + width <= 8 * kind.nbytes, "codes do not fit")
        codes[which] += bitpack.unpack(payload[at : at + nbytes], width, count).to(torch.int64) << used
        at, used = at + nbytes, used + width
    _require(at == len(data), "bytes are left")
    positions, order = torch.cat([each for each, _ in found]).sort()
    codes = torch.cat([each for _, each in found])[order]
    _require(bool((codes < kind.patterns).all()), "a step is too long")
    return positions.to(torch.int32), kind.moved(before[positions], codes).to(kind.bits_dtype)


def width_of(codes: torch.Tensor, is_first: bool) -> int:
    """The bits with which a row of codes, at least one, takes about the fewest bytes, its escapes included.

    It is not 0 where escapes would then have 16 bits, or where escapes have escapes: each row of a class shortens codes
    by a bit or more, so there are at most 17.
    """
    count, longest = codes.numel(), int(codes.max()).bit_length()
    least = int(longest > MAX_WIDTH or (longest > 0 and not is_first))
    longer = {width: int((codes >> width > 0).sum()) for width in range(least, MAX_WIDTH + 1)}
    costs = {width: count * width + _escapes_nbits(each, count, longest - width) for width, each in longer.items()}
    return min(costs, key=lambda width: (costs[width], width))


def _escapes_nbits(escapes: int, count: int, width: int) -> int:
    """An estimate of the bits of a row of escapes, if they need no escapes themselves."""
    if not escapes:
        return 0
    fewer = min(escapes, count - escapes)
    return ROW_BITS + 8 + escapes * width + (fewer * (2 + low_bits(fewer, count)) if fewer else 0)


def low_bits(count: int, numel: int) -> int:
    """The ``low`` with which the gaps of ``count`` members, drawn from ``numel`` numbers, take the fewest bits.

    One more low bit pays while a gap is ``2**low`` or longer with a probability above ``(sqrt(5) - 1) / 2``, which is
    as long as ``2**low`` is below 0.48 of the mean gap less a half.
    """
    return min((-((24 * count - 48 * numel) // (100 * count)) - 1).bit_length(), MAX_LOW)


def write_subset(members: torch.Tensor, numel: int) -> torch.Tensor:
    """The bytes, uint8, of ascending ``members``, int64, of ``range(numel)``."""
    if 2 * members.numel() > numel:
        members = _others(members, numel)
    if not members.numel():
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    low = low_bits(members.numel(), numel)
    gaps = members.diff(prepend=members.new_tensor([-1])) - 1
    places = ((gaps >> low) + 1).cumsum(0) - 1
    string = torch.zeros(int(places[-1]) + 1, dtype=torch.int32, device="cpu")
    string[places] = 1
    return torch.cat([bitpack.pack(gaps & (2**low - 1), low), bitpack.pack(string, 1)])


def read_subset(payload: torch.Tensor, at: int, numel: int, count: int) -> tuple[torch.Tensor, int]:
    """``(members, end)``: the inverse of :func:`write_subset`, for bytes ``at`` to ``end`` of a payload.

    Raises:
        PatchError: they are not a subset of ``count`` of ``numel`` numbers.
    """
    _require(count <= numel, "there are more entries than elements")
    fewer = min(count, numel - count)
    members = torch.empty(0, dtype=torch.int64, device="cpu")
    if fewer:
        low = low_bits(fewer, numel)
        end = at + bitpack.packed_nbytes(fewer, low)
        _require(end < payload.numel(), "a subset is cut off")
        lows = bitpack.unpack(payload[at:end], low, fewer).to(torch.int64)
        string = payload[end : end + (fewer + (numel >> low)) // 8 + 1]
        places = bitpack.unpack(string, 1, string.numel() * 8).nonzero()[:fewer, 0]
        _require(places.numel() == fewer, "a subset is cut off")
        gaps = (places.diff(prepend=places.new_tensor([-1])) - 1) << low | lows
        members = (gaps + 1).cumsum(0) - 1
        _require(int(members[-1]) < numel, "an entry is behind the last element")
        at = end + int(places[-1]) // 8 + 1
    return (_others(members, numel) if 2 * count > numel else members), at


def _others(members: torch.Tensor, numel: int) -> torch.Tensor:
    """The numbers of ``range(numel)`` that are not among the members."""
    left = torch.ones(numel, dtype=torch.bool, device="cpu")
    left[members] = False
    return left.nonzero()[:, 0]


# ---------------------------------------------------------------- all of a chunk


def encode_dense(kind: ElementKind, bits: torch.Tensor) -> bytes:
    """All elements of a chunk."""
    patterns = patterns_of(bits)
    classes = kind.classes(patterns)
    counts = torch.bincount(classes, minlength=1 << kind.exponent_bits).tolist()
    width, table = table_of(kind, counts)
    if not width:
        return b"\0" + _bytes(bits.view(torch.uint8))
    code_of = torch.full((len(counts),), len(table), dtype=torch.int64, device="cpu")
    for code, each in reversed(list(enumerate(table))):
        code_of[each] = code
    codes = code_of[classes]
    rest = (patterns >> kind.exponent_bits & 1 << kind.shift) | patterns & (1 << kind.shift) - 1
    parts = (bitpack.pack(codes, width), bitpack.pack(rest, kind.shift + 1))
    escapes = classes[codes == len(table)].to(torch.uint8)
    return bytes((width, *table)) + b"".join(_bytes(each) for each in (*parts, escapes))


def decode_dense(kind: ElementKind, data: bytes, numel: int) -> torch.Tensor:
    """Bits ``[numel]`` of a chunk that was sent as a whole: the inverse of :func:`encode_dense`.

    Raises:
        PatchError: the bytes are not such a chunk.
    """
    payload = torch.frombuffer(bytearray(data or b"\xff"), dtype=torch.uint8)
    width = int(payload[0])
    if not width:
        _require(len(data) == 1 + numel * kind.nbytes, "a chunk has another size")
        return payload[1:].clone().view(kind.bits_dtype)
    _require(width < kind.exponent_bits, "there are no codes of such a width")
    at = 2**width
    _require(len(data) >= at, "a table is cut off")
    table, ends = payload[1:at].to(torch.int64), [at]
    for each in (width, kind.shift + 1):
        ends.append(ends[-1] + bitpack.packed_nbytes(numel, each))
    _require(len(data) >= ends[2], "codes are cut off")
    codes = bitpack.unpack(payload[ends[0] : ends[1]], width, numel).to(torch.int64)
    rest = bitpack.unpack(payload[ends[1] : ends[2]], kind.shift + 1, numel).to(torch.int64)
    escaped, escapes = codes == table.numel(), payload[ends[2] :].to(torch.int64)
    _require(int(escaped.sum()) == escapes.numel(), "the number of escapes is another one")
    _require(bool((torch.cat([table, escapes]) < 1 << kind.exponent_bits).all()), "there is no such class")
    classes = torch.cat([table, table.new_zeros(1)])[codes]
    classes[escaped] = escapes
    sign, mantissa = rest >> kind.shift << kind.shift + kind.exponent_bits, rest & (1 << kind.shift) - 1
    return (sign | classes << kind.shift | mantissa).to(kind.bits_dtype)


def table_of(kind: ElementKind, counts: list[int]) -> tuple[int, list[int]]:
    """``(width, table)`` with which a chunk with these counts of classes is shortest; ``(0, [])`` for raw patterns."""
    numel, best = sum(counts), (sum(counts) * kind.exponent_bits, 0)
    order = sorted(range(len(counts)), key=lambda each: (-counts[each], each))
    for width in range(1, kind.exponent_bits):
        frequent = order[: 2**width - 1]
        left = numel - sum(counts[each] for each in frequent)
        best = min(best, (numel * width + 8 * (left + len(frequent)), width))
    return best[1], order[: 2 ** best[1] - 1]


# ---------------------------------------------------------------- digests


def digest_of(bits: torch.Tensor, first: int) -> int:
    """The digest of elements whose first one has the number ``first`` in the layout."""
    return digest_at(torch.arange(bits.numel(), dtype=torch.int64, device="cpu"), bits, first)


def digest_at(positions: torch.Tensor, bits: torch.Tensor, first: int) -> int:
    """The digest of the elements with the numbers ``first + positions``."""
    mixed = ((positions.to(torch.int64) + first) << 16 | patterns_of(bits)) + _signed(0x9E3779B97F4A7C15)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(0x94D049BB133111EB)
    return int((mixed ^ _shifted(mixed, 31)).sum()) & _MASK


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number


def _shifted(words: torch.Tensor, count: int) -> torch.Tensor:
    """Words shifted to the right, with zeros from the left."""
    return (words >> count) & ((1 << 64 - count) - 1)


def _bytes(values: torch.Tensor) -> bytes:
    return values.numpy().tobytes()


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise PatchError(reason)
