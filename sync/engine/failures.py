"""Errors of the synchronisation, as training sees them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import torch
from torch.futures import Future


def failure(error: BaseException, event: str = "synchronisation failed") -> RuntimeError:
    """The error to raise in the training because of ``error`` in a lane, which becomes its cause.

    Its text is, for example, ``"gckernels: synchronisation failed: RuntimeError: Connection closed by peer"``.
    """
    raised = RuntimeError(f"gckernels: {event}: {type(error).__name__}: {error}")
    raised.__cause__ = error
    return raised


class FailedBucket:
    """The value of a future whose bucket has not been synchronised; converting it to text raises the error.

    A value keeps the error and its cause, of which an exception in a future would lose the types. DDP wants a tensor,
    and puts the text of anything else into its own error, "Unable to cast ... to Tensor". Backward therefore raises the
    error itself.

    Args:
        error: the error that training raises.
    """

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __str__(self) -> str:
        raise self.error

    def __repr__(self) -> str:
        return repr(self.error)


Outcome: TypeAlias = torch.Tensor | FailedBucket
"""The value of a bucket's future: the bucket, synchronised, or its failure."""


def wait_for(futures: Iterable[Future[Outcome]]) -> None:
    """Wait until buckets have been synchronised; on a device, let its current stream wait.

    Raises:
        RuntimeError: one of them has failed.
    """
    for future in futures:
        if isinstance(outcome := future.wait(), FailedBucket):
            raise outcome.error


def failed_future(error: Exception) -> Future[Outcome]:
    """A future that has failed with ``error``."""
    future: Future[Outcome] = Future()
    future.set_result(FailedBucket(error))
    return future
