"""Lossless patches of weights: the same bits, for about a byte per changed element.

``diff``, ``apply`` and ``merge`` work on bytes. ``publish`` and ``follow`` keep any number of replicas at the weights
of a training, by a store that both reach.
"""

from .chain.follower import follow
from .chain.publisher import publish
from .chain.stores import Folder, Http
from .format.errors import PatchError
from .format.files import apply, diff, digest, merge

__all__ = ["Folder", "Http", "PatchError", "apply", "diff", "digest", "follow", "merge", "publish"]
