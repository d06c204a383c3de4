"""Stores for the tests of patches: in memory, and one that fails when it is told to."""

from __future__ import annotations

import random
from collections.abc import Iterator

from gckernels import patches


class Memory:
    """A store in a dict: the four methods that a user's store needs."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def get(self, name: str) -> bytes | None:
        return self.objects.get(name)

    def put(self, name: str, data: bytes) -> None:
        self.objects[name] = data

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self.objects.setdefault(name, data) is data

    def names(self) -> list[str]:
        return list(self.objects)


class Cut(OSError):
    """The connection to a store is gone."""


class Unreliable:
    """A store whose call number ``cut`` fails, before or after it has done its work, and all calls after it.

    ``deletes`` is missing like in a store that is not pruned, unless the inner one has ``delete``.
    """

    def __init__(self, inner: Memory | patches.Folder, cut: int, is_done: bool) -> None:
        self.inner, self.left, self.is_done = inner, cut, is_done
        if hasattr(inner, "delete"):
            self.delete = lambda name: self._call("delete", name)

    def get(self, name: str) -> bytes | None:
        return self._call("get", name)

    def put(self, name: str, data: bytes) -> None:
        self._call("put", name, data)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self._call("put_if_absent", name, data)

    def names(self) -> list[str]:
        return self._call("names")

    def _call(self, method: str, *arguments: object) -> object:
        self.left -= 1
        if self.left < 0 or (self.left == 0 and not self.is_done):
            raise Cut("cut")
        result = getattr(self.inner, method)(*arguments)
        if self.left == 0:
            raise Cut("cut")
        return result


def moments(seed: int, count: int, until: int) -> Iterator[tuple[int, bool]]:
    """``(number of a call, whether its work is done)`` of random failures."""
    drawn = random.Random(seed)
    for _ in range(count):
        yield drawn.randrange(1, until), drawn.random() < 0.5
