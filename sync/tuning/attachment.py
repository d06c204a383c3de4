"""The attachment of a DDP model, as users have it."""

from __future__ import annotations

from ..attach import ddp
from ..reporting.reported import Reported


class Attachment(ddp.Attachment, Reported):
    """The hook that :func:`~gckernels.sync.attach` has registered, with its engine and residuals."""
