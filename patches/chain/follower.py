"""Following: a replica that has the weights of a publisher, version by version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..format.elements import Elements, elements_of
from ..format.errors import PatchError
from ..format.layout import TensorLayout
from .records import Latest, read_latest, read_layout
from .staging import Position, StagedVersion, stage
from .stores import PatchStore

_TRIES = 3


def tensors_of(caller: str, model: Any) -> Mapping[str, torch.Tensor]:
    """The tensors of a module, by their names in its ``state_dict``, or of a mapping.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(model, torch.nn.Module):
        model = getattr(model, "_orig_mod", model)  # torch.compile wraps it
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        tensors: Mapping[str, torch.Tensor] = model.state_dict(keep_vars=True)  # tied parameters are one object
        return tensors
    if isinstance(model, Mapping):
        return model
    raise TypeError(f"{caller}: a module or tensors by name are expected, got {type(model).__name__}")


def follow(
    replica: torch.nn.Module | Mapping[str, torch.Tensor],
    store: PatchStore,
    *,
    names: Callable[[str], torch.Tensor] | None = None,
    key: bytes | None = None,
) -> Follower:
    """A follower, which brings a replica to the versions of a publisher.

    Args:
        replica: a module, or tensors by name, with the shapes and types that are published; their values do not matter.
        store: the store of the publisher: :class:`Folder`, :class:`Http`, or an object with their methods.
        names: returns the tensor of the replica for a published name, for replicas with other names: a view of a part
            of a fused tensor, for instance. By default names are the same on both sides, and all are needed.
        key: the publisher's key.

    Raises:
        TypeError, ValueError: the replica does not have the published tensors. If nothing is published yet, the first
            ``fetch`` that finds a version says so.
    """
    return Follower(replica, store, names, key)


class Follower:
    """The handle of a replica; :func:`~gckernels.patches.follow` makes it.

    Attributes:
        version: the version of the replica, or ``None`` if it has none: before the first ``apply``, and after one that
            has failed.
        digest: the digest of its weights, or ``None``.
    """

    def __init__(
        self, replica: object, store: PatchStore, names: Callable[[str], torch.Tensor] | None, key: bytes | None
    ) -> None:
        self._replica, self._store, self._names, self._key = replica, store, names, key
        self._position: Position | None = None
        self._layout: TensorLayout | None = None
        if names is None:
            tensors_of("follow", replica)
        if (latest := read_latest(store)) is not None:
            self._elements(latest)

    @property
    def version(self) -> int | None:
        """The version of the replica, or ``None`` if it has none."""
        return None if self._position is None else self._position.version

    @property
    def digest(self) -> int | None:
        """The digest of the replica's weights, or ``None`` if it has no version."""
        return None if self._position is None else self._position.digest

    def fetch(self) -> StagedVersion | None:
        """The newest version, downloaded, checked and decoded, or ``None`` if the replica has it. Nothing is written.

        A replica that is behind gets the changes of all versions since in one. Where that is impossible, because it has
        no version, or what it needs is no longer there, it gets all weights from an anchor.

        Raises:
            PatchError: the store has no way to the newest version, or something in it is damaged.
            OSError: the store cannot be read.
        """
        error: PatchError | None = None
        latest: Latest | None = None
        for _ in range(_TRIES):
            earlier, latest = latest, read_latest(self._store)
            if latest is None or (error is not None and latest == earlier):
                break
            begin = self._position
            if begin is not None and begin.run == latest.run:
                if begin.version == latest.version:
                    return None
                if begin.version < latest.version:
                    try:
                        return self._staged(latest, begin)
                    except PatchError:
                        pass  # the chain is pruned, or goes another way: there is the anchor
            try:
                return self._staged(latest, None)
            except PatchError as problem:
                error = problem  # a publisher may have pruned meanwhile
        if error is not None:
            raise error
        return None

    def apply(self, staged: StagedVersion) -> None:
        """Bring the replica to a fetched version, in place.

        If this fails midway, the replica has no version, and the next ``fetch`` begins at an anchor.

        Raises:
            PatchError: the replica is at another version than the one from which it was fetched, or its weights have
                been changed since. Nothing is written.
        """
        if staged.begin is not None and staged.begin != self._position:
            raise PatchError(f"this was fetched for version {staged.base}, and the replica has {self.version}: fetch")
        with torch.inference_mode():  # in which any tensor can be written
            for change in staged.parts if staged.begin is not None else ():
                change.require_old()
            self._position = None
            for change in staged.parts:
                change.write()
            staged.elements.finish()
        self._position = staged.end

    def _staged(self, latest: Latest, begin: Position | None) -> StagedVersion:
        return stage(self._store, latest, self._elements(latest), self._key, begin, None)

    def _elements(self, latest: Latest) -> Elements:
        """The published elements, in the replica's tensors."""
        if self._layout is None or self._layout.digest.hex() != latest.layout:
            self._layout = read_layout(self._store, latest.layout)
        if self._names is not None:
            return elements_of("follow", self._layout, self._names)
        tensors = tensors_of("follow", self._replica)
        published = {entry.name for entry in self._layout.entries} | {*self._layout.tied}
        for name in sorted(published ^ {*tensors}):
            where = "published, and not in the replica" if name in published else "in the replica, and not published"
            raise ValueError(f"follow: {name} is {where}; names= maps published names to tensors")
        return elements_of("follow", self._layout, tensors.__getitem__)
