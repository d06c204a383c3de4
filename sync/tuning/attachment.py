"""The attachment of a DDP model, as users have it."""

from __future__ import annotations

from ..frontends.ddp import ddp
from ..reporting.reported import Reported
from .tunable import Tunable

_UNEVEN = "in join() ranks may have different numbers of steps, and it needs all ranks in each"


class Attachment(Tunable, ddp.DdpAttachment, Reported):
    """The hook that :func:`~gckernels.sync.attach` has registered, with its engine and residuals.

    Without a plan there is no hook at first, and the plan changes while the model is trained.
    """

    def close(self) -> None:
        self._end_tuning()
        super().close()

    def _meet_uneven_steps(self) -> None:
        if self._tuner is not None:
            self._end_tuning()
            if self._next_buckets is None:  # otherwise the hook stays, and averages exactly
                self._abandon_change()
            self._warn_of_failure(_UNEVEN)
