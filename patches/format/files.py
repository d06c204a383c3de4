"""Patches as bytes, between tensors, without a store."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from . import changes
from .elements import Elements, described, elements_of
from .errors import PatchError
from .objects import NO_BASE, PatchObject, opened

Tensors = Mapping[str, torch.Tensor]


def digest(tensors: Tensors) -> int:
    """The digest of tensors, 64 bits, which publisher and followers compare.

    It is a sum over elements, so parts of the tensors have digests that add up. It finds accidents, and is no
    protection against somebody who looks for tensors with the same digest.

    Raises:
        TypeError, ValueError: something is no dense tensor.
    """
    return _elements("digest", tensors).digest()


def diff(old: Tensors, new: Tensors, *, key: bytes | None = None) -> bytes:
    """The patch from old to new tensors, as bytes.

    Tensors of bf16, fp16 and fp8 are coded as what they are, and all others byte for byte. Chunks of 2**20 elements of
    which more than 60 % have changed are sent as a whole, with short codes for exponents.

    Args:
        old: tensors by name. Neither these nor the new ones may change meanwhile.
        new: tensors of the same names, shapes and types.
        key: if given, the patch ends with an HMAC in place of a SHA-256.

    Raises:
        TypeError, ValueError: something is no dense tensor, or the tensors differ in more than their values.
    """
    before, after = _elements("diff", old), _elements("diff", new)
    if before.layout != after.layout:
        raise ValueError(f"diff: old and new differ: {before.layout.difference(after.layout)}")
    return changes.encoded(before, after, 1, 0, before.digest())[0].sealed(key)


def apply(data: bytes, tensors: Tensors, *, key: bytes | None = None) -> None:
    """Bring tensors to what they were when the patch was made, in place. Everything is checked before it is written.

    Args:
        data: a patch or an anchor.
        tensors: the tensors before it. An anchor takes any values.
        key: the key with which it was made.

    Raises:
        PatchError: the patch is damaged, or for other tensors. Nothing is written.
        TypeError, ValueError: something is no dense tensor, or overlaps with another one.
    """
    elements = _elements("apply", tensors)
    found, part = _checked("the patch", data, elements, key)
    with torch.inference_mode():  # in which any tensor can be written
        for change in changes.decoded((found,), part):
            change.write()
        elements.finish()


def merge(first: bytes, second: bytes, tensors: Tensors, *, key: bytes | None = None) -> bytes:
    """One patch in place of two that follow each other: shorter than both, and applied at once.

    Args:
        first: a patch.
        second: the patch after it.
        tensors: the tensors before the first one, which stay as they are. A patch counts elements within classes of
            exponents, so its positions cannot be known without them.
        key: the key of all three.

    Raises:
        PatchError: a patch is damaged, for other tensors, or does not follow the first one.
        TypeError, ValueError: something is no dense tensor.
    """
    elements = _elements("merge", tensors)
    earlier, part = _checked("first", first, elements, key)
    later = opened(second, key, elements.layout, "second")
    if later.is_whole and later.spans == earlier.spans:
        return second
    if (later.before, later.spans) != (earlier.after, earlier.spans):
        raise PatchError("second does not begin where first ends")
    if earlier.base == NO_BASE:
        raise PatchError("first is an anchor: apply it, then second")
    return changes.merged(earlier, later, part).sealed(key)


def _checked(name: str, data: bytes, elements: Elements, key: bytes | None) -> tuple[PatchObject, Elements]:
    """The object in bytes, and its elements, which it is for."""
    found = opened(data, key, elements.layout, name)
    part = elements.within(found.spans)
    if not found.is_whole and part.digest() != found.before:
        raise PatchError(f"{name} is for tensors with other values: their digest is another one")
    return found, part


def _elements(caller: str, tensors: Tensors) -> Elements:
    return elements_of(caller, described(caller, tensors), tensors.__getitem__)
