"""Errors of the synchronisation, as training sees them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.futures import Future

from ..communication.communicators import Communicators
from ..resources.stage import Stage
from ..resources.workers import LaneFailure

if TYPE_CHECKING:
    from ..communication.reports import Report


def failure(error: BaseException, event: str = "synchronisation failed", report: str = "") -> RuntimeError:
    """The error to raise in the training because of ``error`` in a lane, which becomes its cause.

    Its text is, for example, ``"gckernels: synchronisation failed: RuntimeError: Connection closed by peer"``, with
    what ranks ``report`` of it in front of the cause.
    """
    raised = RuntimeError(f"gckernels: {event}: {report and f'{report}: '}{type(error).__name__}: {error}")
    raised.__cause__ = error
    return raised


class Failures:
    """The first error of the lanes of an engine, with what other ranks say of it.

    Args:
        lanes: tells the error.
        communicators: the ranks; ``None`` if they have nothing to say.

    Attributes:
        step: the training step whose messages were submitted last; ``None`` if they belong to none.
    """

    def __init__(self, lanes: LaneFailure, communicators: Communicators | None) -> None:
        self.step: int | None = None
        self._communicators = communicators
        self._report: Report | None = None
        lanes.tell = self._note

    def _note(self, error: BaseException, stage: Stage | None) -> None:
        """Tell the other ranks where the first error is."""
        if (communicators := self._communicators) is not None:
            from ..communication import reports

            place = None
            if stage is not None and stage.spec.level is not None:
                place = stage.spec.name, stage.keys, stage.spec.level
            self._report = reports.reported(communicators, place, self.step, error)

    def raised(self, error: BaseException, event: str = "synchronisation failed") -> RuntimeError:
        """The error to raise in the training. Waits for a moment for what other ranks say."""
        return failure(error, event, "" if self._report is None else self._report.text())


class FailedBucket:
    """The value of a future whose bucket has not been synchronised; converting it to text raises the error.

    A value keeps the error and its cause, of which an exception in a future would lose the types. DDP wants a tensor,
    and puts the text of anything else into its own error, "Unable to cast ... to Tensor". Backward therefore raises the
    error itself.

    Args:
        make: returns the error that training raises, when training asks for it.
    """

    def __init__(self, make: Callable[[], Exception]) -> None:
        self._make = make

    @functools.cached_property
    def error(self) -> Exception:
        """The error that training raises."""
        return self._make()

    def __reduce__(self) -> tuple[Any, ...]:
        # a future on a device pickles its value to find the tensors in it, of which this has none
        return FailedBucket, (None,)

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
    future.set_result(FailedBucket(lambda: error))
    return future
