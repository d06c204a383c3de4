"""Lossless patches of weights: the same bits, for about a byte per changed element."""

from .format.errors import PatchError
from .format.files import apply, diff, digest, merge

__all__ = ["PatchError", "apply", "diff", "digest", "merge"]
