"""The attachment of a DDP model, as users have it."""

from __future__ import annotations

from ..attach import ddp
from ..reporting.reported import Reported
from .tunable import Tunable


class Attachment(Tunable, ddp.Attachment, Reported):
    """The hook that :func:`~gckernels.sync.attach` has registered, with its engine and residuals.

    Without a plan there is no hook at first, and the plan changes while the model is trained.
    """

    def close(self) -> None:
        self._end_tuning()
        super().close()
