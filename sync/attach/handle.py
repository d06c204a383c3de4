"""Methods shared by attachments and synchronizers, for figures and checkpoints; their runtime answers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..engine.runtime import Runtime
from ..states.refusal import refuse_to_be_deeper

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

    from .checkpoint import Checkpoint


class Handle:
    """Methods shared by ``Attachment`` and ``Synchronizer``: bytes sent, residuals, checkpoints."""

    _runtime: Runtime

    __create_write_items__ = refuse_to_be_deeper

    def sent_nbytes_per_step(self) -> float:
        """Mean bytes that this rank has put on the wire per compressed step; 0 before the first."""
        return self._runtime.sent_nbytes_per_step()

    def residual_nbytes(self) -> int:
        """Bytes that residuals, the factors of low-rank methods, and their copies for a gradient scaler take on this
        rank."""
        return self._runtime.residual_nbytes()

    def state_dict(self) -> dict[str, Any]:
        """The state that every rank saves for itself, for a resumed job to go on exactly: tensors, ints, texts, and the
        plan as JSON. ``torch.distributed.checkpoint`` refuses it, and takes what :meth:`checkpoint` returns."""
        return self._runtime.state_dict()

    def checkpoint(
        self, reads: str | os.PathLike[str] | StorageReader | None = None, key: str | None = None
    ) -> Checkpoint:
        """An object that ``torch.distributed.checkpoint`` (DCP) saves and loads, for all ranks together::

            dcp.save({"model": ..., "gckernels": attachment.checkpoint()}, checkpoint_id=path)
            dcp.load({"model": ..., "gckernels": attachment.checkpoint(reads=path)}, checkpoint_id=path)

        The job that loads may have another number of ranks, and other programs, as with a list of all states.

        Args:
            reads: what will be loaded: the path of the checkpoint, or a ``StorageReader``. DCP loads into tensors that
                are there already, and these depend on what was saved. Once it is loaded, the object is one to save.
            key: under which it was saved in that checkpoint; needed where there are several.

        Raises:
            TypeError: an argument is of another type.
        """
        from .checkpoint import Checkpoint  # not before: it takes half a second to import DTensor

        return Checkpoint(self._runtime, reads, key)

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]] | tuple[dict[str, Any], ...]) -> None:
        """Take over what :meth:`state_dict` of the same rank of an equally large job returned; or, from the list of
        those of all ranks of a job of any size, the part of this rank. All ranks give the same list.

        Raises:
            ValueError: of another rank or world size, of a plan with other units or compressors, not all of one job,
                or damaged. Nothing has been changed.
        """
        self._runtime.load_state_dict(state)
