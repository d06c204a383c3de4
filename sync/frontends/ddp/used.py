"""Parameters that backward passes have used, as autograd tells it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.utils.hooks import RemovableHandle

from ..checks.models import on_accumulated


class UsedParameters:
    """The parameters that have had a gradient on this rank since the last average, even if it was only accumulated.

    Args:
        parameters: the parameters to watch.

    Attributes:
        ids: the ids of the used ones so far.
        handles: handles of the hooks, which end the watch when they are removed.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.ids: set[int] = set()
        self.handles: list[RemovableHandle] = [on_accumulated(each, _adding(self.ids)) for each in parameters]


def _adding(ids: set[int]) -> Callable[[torch.Tensor], None]:
    """The hook of a parameter, which refers to none."""
    return lambda parameter: ids.add(id(parameter))
