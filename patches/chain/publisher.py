"""Publishing: versions of a model's weights, written to a store as patches.

A publisher keeps a copy of the weights that it has published, as bits on the CPU. The copy moves on when the store has
a version and ``latest`` names it, on all ranks or on none.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist

from ..format.changes import Change, anchor, encoded
from ..format.elements import Elements, Piece, described
from ..format.errors import PatchError
from ..format.kinds import BYTES, kind_of_dtype
from ..format.layout import TensorLayout
from ..format.objects import PatchObject
from .follower import tensors_of
from .ranks import PublisherRanks
from .records import Latest, VersionRecord, latest_of, number_of, read_latest, read_layout, read_version, text_of
from .staging import stage
from .stores import PatchStore


def publish(
    model: torch.nn.Module | Mapping[str, torch.Tensor],
    store: PatchStore,
    *,
    anchor_every: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    key: bytes | None = None,
    group: dist.ProcessGroup | None = None,
) -> Publisher:
    """A publisher of a model's weights. In an empty store it writes them as version 0; otherwise it goes on with the
    chain that is there.

    Every rank of a distributed training calls it, and then ``publish`` of what it returns. Each rank writes its shards
    of an FSDP2 model; what all ranks have, as with DDP, is written once.

    Args:
        model: a module, or tensors by name.
        store: :class:`Folder`, :class:`Http`, or an object with their methods. If it has ``delete``, what no follower
            needs is removed: everything before the anchor before the last one.
        anchor_every: the number of versions from one anchor to the next. An anchor has all weights, for those that
            come late.
        dtype: the type of 8 or 16 bits in which tensors of fp32 and fp64 are published. Others keep their own.
        key: if given, objects end with an HMAC, which followers check with the same key.
        group: the ranks; by default all of them.

    Raises:
        TypeError, ValueError: an argument is wrong, or a tensor cannot be published.
        PatchError: the store has the weights of another model, or is damaged.
    """
    if type(anchor_every) is not int or anchor_every < 1:
        raise ValueError(f"publish: anchor_every must be a positive integer, got {anchor_every!r}")
    if kind_of_dtype(dtype) is BYTES:
        raise ValueError(f"publish: dtype must be a floating-point type of 8 or 16 bits, got {dtype}")
    return Publisher(model, store, anchor_every, dtype, key, PublisherRanks(group))


class Publisher:
    """The handle of a published model; :func:`~gckernels.patches.publish` makes it.

    Attributes:
        version: the newest version.
        digest: the digest of the elements that this rank has published. The sum over all ranks, modulo 2**64, is the
            digest of the weights.
        nbytes: bytes that this rank has written for the newest version, without an anchor.
    """

    def __init__(
        self, model: object, store: PatchStore, anchor_every: int, dtype: torch.dtype, key: bytes | None,
        ranks: PublisherRanks,
    ) -> None:  # fmt: skip
        self._model, self._store, self._anchor_every, self._dtype, self._key = model, store, anchor_every, dtype, key
        self._ranks = ranks
        self._layout: TensorLayout | None = None
        self._sent = ranks.together(self._model_now)
        self._layout = self._sent.layout
        if len({*ranks.texts(self._layout_name)}) > 1:
            raise ValueError("publish: the ranks have tensors of other names, shapes or types")
        self._latest = Latest(0, "version-0", "", self._layout_name)
        self.version, self.digest, self.nbytes = 0, 0, 0
        self._is_behind = True  # this copy may not be the newest version in the store
        self._resume()

    def publish(self) -> int:
        """Publish the weights as they are now, and return their version. They must not change meanwhile.

        Where most of the weights have changed, all of them are written. If an error is raised, the store has all of the
        version or nothing: the next call finds out, and goes on from there.

        Raises:
            PatchError: another publisher writes to the same store.
            OSError: the store cannot be written.
            RuntimeError: publishing has failed on another rank. All ranks raise.
        """
        if self._is_behind:
            self._resume()
        now = self._ranks.together(self._model_now)
        self._commit(self.version + 1, *self._ranks.together(lambda: self._encoded(now)))
        if self.version - _anchor_number(self._latest) >= self._anchor_every:
            self._write_anchor()
        return self.version

    def _model_now(self) -> Elements:
        """This rank's elements of the model."""
        tensors = tensors_of("publish", self._model)
        layout = described("publish", tensors, self._dtype)
        if self._layout is not None and layout != self._layout:
            raise ValueError(f"publish: the model has changed: {layout.difference(self._layout)}")
        return self._ranks.elements(layout, tensors)

    def _encoded(self, now: Elements) -> tuple[PatchObject, list[Change]]:
        return encoded(self._sent, now, self.version + 1, self.version, self.digest)

    def _commit(self, version: int, content: PatchObject, changes: list[Change]) -> None:
        """Write a version, and let the copy follow it."""
        self._is_behind = True
        names, is_whole = self._written("patch", content)
        record = VersionRecord(version, is_whole, names, self._latest.run, self._layout_name)
        anchor_name = f"version-{version}" if is_whole else self._latest.anchor
        latest = Latest(version, anchor_name, self._latest.run, self._layout_name)

        def commit() -> bool:
            if self._ranks.rank == 0:
                if not self._store.put_if_absent(f"version-{version}", text_of(record)):
                    raise PatchError(f"another publisher has written version {version} to this store")
                self._store.put("latest", text_of(latest))
                if is_whole and version:
                    self._prune(_anchor_number(self._latest))
            return True

        self._ranks.together(commit)
        for change in changes:
            change.write()
        self._latest, self.version, self.digest = latest, version, content.after
        self._is_behind = False

    def _written(self, kind: str, content: PatchObject) -> tuple[tuple[str, ...], bool]:
        """Write this rank's object. Returns the names of those of all ranks, and whether all of these are whole."""
        name = f"{kind}-{content.version}-{secrets.token_hex(4)}.{self._ranks.rank}"

        def write() -> bool:
            data = content.sealed(self._key)
            self.nbytes = len(data) if kind == "patch" else self.nbytes
            self._store.put(name, data)
            return True

        self._ranks.together(write)
        found = [text.split() for text in self._ranks.texts(f"{name} {content.is_whole:d}")]
        return tuple(each[0] for each in found), all(each[1] == "1" for each in found)

    def _write_anchor(self) -> None:
        """Write all weights of the newest version, and remove what is no longer needed."""
        name, older = f"anchor-{self.version}", _anchor_number(self._latest)
        names, _ = self._written("dense", self._ranks.together(lambda: anchor(self._sent, self.version)))
        record = VersionRecord(self.version, True, names, self._latest.run, self._layout_name)
        latest = Latest(self.version, name, self._latest.run, self._layout_name)

        def commit() -> bool:
            if self._ranks.rank == 0:
                self._store.put_if_absent(name, text_of(record))
                self._store.put("latest", text_of(latest))
                self._prune(older)
            return True

        self._ranks.together(commit)
        self._latest = latest

    def _prune(self, oldest: int) -> None:
        """Remove what belongs to versions before an anchor, which followers may still be reading."""
        delete: Callable[[str], None] | None = getattr(self._store, "delete", None)
        if delete is None:
            return
        with contextlib.suppress(OSError):  # the next anchor tries again
            for name in self._store.names():
                number = number_of(name)
                if number is not None and number < oldest:
                    delete(name)

    @property
    def _layout_name(self) -> str:
        assert self._layout is not None
        return self._layout.digest.hex()

    def _resume(self) -> None:
        """Make the copy the newest version in the store, on all ranks; the first one if the store is empty."""
        self._is_behind = True
        text = self._ranks.texts(self._ranks.together(lambda: "" if self._ranks.rank else self._newest()))[0]
        latest = latest_of(text.encode())
        if not latest.layout:
            self._latest = Latest(0, "version-0", latest.run, self._layout_name)
            self._sent = _copy(self._ranks.together(self._model_now), with_values=True)
            content = self._ranks.together(lambda: anchor(self._sent, 0))
            self._commit(0, content, [])
            return
        sent = _copy(self._sent, with_values=False)
        self._latest, self.version = latest, latest.version

        def read() -> int | None:
            """The digest of the copy, brought to the newest version; ``None`` if others have written other parts."""
            try:
                staged = stage(self._store, latest, sent, self._key, None, self._ranks.rank)
            except PatchError:
                return None
            for change in staged.parts:
                change.write()
            return staged.digest

        digests = self._ranks.together(lambda: (read(),))
        if all(self._ranks.texts("" if digests[0] is None else "read")):
            assert digests[0] is not None
            self._sent, self.digest, self._is_behind = sent, digests[0], False
            return
        # Other parts, or a damaged chain: the next version needs nothing before it.
        self._sent = _copy(self._ranks.together(self._model_now), with_values=True)
        self._commit(self.version + 1, self._ranks.together(lambda: anchor(self._sent, self.version + 1)), [])

    def _newest(self) -> str:
        """The record of the newest version that there is; ``latest`` names it then. In an empty store a new run.

        A publisher may have been killed before ``latest`` was written.
        """
        assert self._layout is not None
        latest, written = read_latest(self._store), True
        if latest is None:
            first = read_version(self._store, "version-0")
            if first is None:
                self._store.put(f"layout-{self._layout_name}", self._layout.text)
                return text_of(Latest(0, "version-0", secrets.token_hex(8), "")).decode()
            latest, written = Latest(0, "version-0", first.run, first.layout), False
        while (record := read_version(self._store, f"version-{latest.version + 1}")) is not None:
            name = f"version-{record.version}" if record.is_whole else latest.anchor
            latest, written = Latest(latest.version + 1, name, record.run, record.layout), False
        if latest.layout != self._layout_name:
            difference = self._layout.difference(read_layout(self._store, latest.layout))
            raise PatchError(f"publish: the store has the weights of another model: {difference}; use another folder")
        if not written:
            self._store.put("latest", text_of(latest))
        return text_of(latest).decode()


def _anchor_number(latest: Latest) -> int:
    """The version of the newest anchor."""
    return number_of(latest.anchor) or 0


def _copy(elements: Elements, with_values: bool) -> Elements:
    """Elements with memory of their own on the CPU: bits, the same ones or zeros."""
    pieces = []
    for piece in elements.pieces:
        bits = torch.zeros(piece.numel, dtype=piece.entry.kind.bits_dtype, device="cpu")
        if with_values:
            bits.copy_(piece.bits(0, piece.numel))
        pieces.append(Piece(piece.entry, piece.first, bits))
    return Elements(elements.layout, tuple(pieces))
