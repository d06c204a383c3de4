"""The end of a backward that the training itself declares.

With ``require_manual_backward_finalization``, which torch has from 2.15 on, DDP waits for its buckets only when the
training calls ``finalize_backward()``: after backward, or in one of its hooks. DDP has no hook for that, so the
function is replaced by one that does the same and calls those who follow a model.
"""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

_NAME, _REQUIRED = "finalize_backward", "require_manual_backward_finalization"
_Functions: TypeAlias = "tuple[Callable[[], None], Callable[[], None]]"
_followers: weakref.WeakKeyDictionary[Any, OrderedDict[int, _Functions]] = weakref.WeakKeyDictionary()


def follow_finalization(
    ddp_model: DistributedDataParallel, before: Callable[[], None], after: Callable[[], None]
) -> RemovableHandle:
    """Call functions around each ``finalize_backward()`` of a model; without effect in releases that lack it.

    Args:
        ddp_model: the model.
        before: called before DDP waits for its buckets.
        after: called when DDP has averaged all gradients.

    Returns:
        A handle whose ``remove`` ends that.
    """
    _replace()
    functions = _followers.setdefault(ddp_model, OrderedDict())
    handle = RemovableHandle(functions)
    functions[handle.id] = before, after
    return handle


@functools.cache
def _replace() -> None:
    original = getattr(DistributedDataParallel, _NAME, None)
    if original is None:
        return

    @functools.wraps(original)
    def finalize_backward(ddp_model: DistributedDataParallel) -> None:
        functions = list(_followers.get(ddp_model, {}).values())
        for before, _ in functions:
            before()
        original(ddp_model)
        for _, after in functions:
            after()

    setattr(DistributedDataParallel, _NAME, finalize_backward)


def keep_manual(ddp_model: Any) -> None:
    """Tell the new reducer of a model whether the training declares the ends of backwards."""
    if getattr(ddp_model, _REQUIRED, False):
        setattr(ddp_model, _REQUIRED, True)
