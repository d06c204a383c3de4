"""Methods shared by attachments and synchronizers, for figures and checkpoints; their runtime answers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..states.refusal import refuse_to_be_deeper
from .figures import Figures

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader

    from .checkpoint import Checkpoint


class Handle(Figures):
    """Methods shared by ``Attachment`` and ``Synchronizer``: figures, bytes sent, residuals, checkpoints."""

    __create_write_items__ = refuse_to_be_deeper

    def sent_nbytes_per_step(self) -> float:
        """The mean number of bytes that this rank has sent per compressed step; 0 before the first.

        For an attachment whose plan compresses nothing, these are the bytes of a step of DDP.
        """
        return self._runtime.sent_nbytes_per_step()

    def residual_nbytes(self) -> int:
        """The bytes that residuals, the factors of low-rank methods, and their copies for a gradient scaler take on
        this rank."""
        return self._runtime.residual_nbytes()

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank, with which a resumed job continues bit for bit: tensors, ints, texts, and the plan as
        JSON. Every rank saves its own. ``torch.distributed.checkpoint`` refuses it, and takes the result of
        :meth:`checkpoint`.

        ``step`` counts the synchronised steps; an attachment whose plan compresses nothing leaves them to DDP, and
        counts none.
        """
        return self._runtime.state_dict()

    def checkpoint(
        self, reads: str | os.PathLike[str] | StorageReader | None = None, key: str | None = None
    ) -> Checkpoint:
        """An object that ``torch.distributed.checkpoint`` (DCP) saves and loads for all ranks together::

            dcp.save({"model": ..., "gckernels": attachment.checkpoint()}, checkpoint_id=path)
            dcp.load({"model": ..., "gckernels": attachment.checkpoint(reads=path)}, checkpoint_id=path)

        The job that loads may have another number of ranks, and other programs, as with a list of all states.

        Args:
            reads: the path of the checkpoint that will be loaded, or a ``StorageReader`` for it. DCP loads into
                existing tensors, whose shapes depend on the checkpoint. Once loaded, the object can be saved.
            key: the key under which it was saved in that checkpoint; needed if there are several.

        Raises:
            TypeError: an argument has another type.
        """
        from .checkpoint import Checkpoint  # late, because importing DTensor takes half a second

        return Checkpoint(self._runtime, reads, key)

    def load_state_dict(self, state: dict[str, Any] | list[dict[str, Any]] | tuple[dict[str, Any], ...]) -> None:
        """Continue from the state of the same rank of an equally large job, or from the list of the states of all ranks
        of a job of any size. With a list, all ranks pass the same one and take their part of it.

        Raises:
            ValueError: the state is from another rank or world size, from a plan with other units or compressors, or
                damaged; or the list does not have all states of one job. Nothing has been changed.
        """
        self._runtime.load_state_dict(state)
