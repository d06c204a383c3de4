"""The error of patches."""

from __future__ import annotations


class PatchError(Exception):
    """Raised where a patch, an anchor or a record is damaged, missing, or not for these tensors.

    Nothing has been written where it is raised by :func:`~gckernels.patches.apply` or ``Follower.fetch``.
    """
