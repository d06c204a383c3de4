"""The buckets in which a runtime averages updates: those of a bare module, with updates where gradients would lie."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from ...engine.runtime import Runtime
from ...plans.buckets import UPDATE_BUCKET_NBYTES
from ...plans.strides import in_reals
from ..members import Members
from ..module.buckets import Bucket, Layouts
from .anchors import Anchors, Arrival
from .schedule import Round
from .site_parameters import values_of


class UpdateBuckets:
    """The buckets of the updates of a model.

    Args:
        runtime: averages the updates.
        members: the parameters of the model.
        anchors: the anchors, from which updates are measured.
        fragments: the number of fragments in which a round sends the model.

    Attributes:
        averaged_nbytes: the bytes of the updates of one fragment.
    """

    def __init__(self, runtime: Runtime, members: Members, anchors: Anchors, fragments: int) -> None:
        runtime.first_is_dense = False
        self._runtime, self._members, self._anchors, self._fragments = runtime, members, anchors, fragments
        numel = sum(in_reals(form).numel() for form in anchors.members.forms.values())
        self._layouts = Layouts(runtime, anchors.members, min(UPDATE_BUCKET_NBYTES, 4 * numel // fragments))
        self._buckets, self._sent = list[Bucket](), frozenset[str]()
        self._lay_out()

    def close(self) -> None:
        """Free the buckets."""
        self._layouts.close()

    @property
    def averaged_nbytes(self) -> int:
        return sum(bucket.vector.nbytes for bucket in self._buckets) // self._fragments

    def cut(self, fragments: int) -> list[list[Bucket]]:
        """The buckets in runs of about the same number of bytes. A run is empty if there are too few buckets."""
        runs: list[list[Bucket]] = [[] for _ in range(fragments)]
        total, before = sum(bucket.vector.nbytes for bucket in self._buckets), 0
        for bucket in self._buckets:
            middle = before + bucket.vector.nbytes / 2
            runs[min(int(middle * fragments / total), fragments - 1)].append(bucket)
            before += bucket.vector.nbytes
        return runs

    def send(
        self, running: Round, number: int, frozen: Collection[str], deliver: Callable[[str, torch.Tensor], None]
    ) -> Arrival:
        """Measure the updates of a fragment and send them.

        Args:
            running: the round that sends it.
            number: its number in the round.
            frozen: the names of frozen parameters that are sent as well.
            deliver: called with the name and the update of every parameter, which is its own gradient.

        Returns:
            The fragment on its way.

        Raises:
            RuntimeError: parameters are trained that the attachment does not know.
        """
        runtime = self._runtime
        self._lay_out(frozen)
        buckets = self.cut(running.fragments)[number]
        messages = [bucket.messages.now() for bucket in buckets]
        runtime.unused.begin()
        runtime.begin_step()
        futures, means = [], dict[str, torch.Tensor]()
        for bucket, built in zip(buckets, messages, strict=True):
            means |= self._measure(bucket, deliver)
            futures.append(runtime.submit(built, bucket.vector))
        runtime.end_step()
        return Arrival(means, {}, running.delay, futures)

    def _lay_out(self, frozen: Collection[str] = ()) -> None:
        """Take the buckets for the parameters that are trained now, and for some that are frozen."""
        sent = self._members.trained().intersection(self._anchors.values).union(frozen)
        if sent != self._sent:
            self._buckets, self._sent = self._layouts.of(sent), sent

    def _measure(self, bucket: Bucket, deliver: Callable[[str, torch.Tensor], None]) -> dict[str, torch.Tensor]:
        """Write the updates of a bucket into it, with the sign of gradients, and return those by name."""
        bucket.begin()
        updates = {}
        for slot in bucket.slots:
            parameter = self._members.references[slot.name]()
            if parameter is None or slot.name not in bucket.expected:
                slot.view.zero_()
                continue
            values = values_of(parameter)
            torch.sub(self._anchors.begin(slot.name, values), values.to(slot.view.dtype), out=slot.view)
            update = slot.view.detach()
            update.grad = slot.view
            deliver(slot.name, update)
            slot.scale(self._runtime.share, all_reduced=self._runtime.is_exact)
            updates[slot.name] = slot.view
        return updates
