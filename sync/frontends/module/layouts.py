"""The buckets of a bare module's plan, for whichever parameters are trained at present.

A frozen parameter is in no bucket, so it takes no memory and is never sent. Its residual stays, in case it is thawed. A
training that freezes parameters in turn, such as those of two networks, finds its buckets and their messages again.
"""

from __future__ import annotations

import warnings

from ...engine.runtime import Runtime
from ...plans.buckets import cut_buckets
from ...plans.checks import fitted_units
from ...plans.strides import in_reals
from ..members import Members, listed
from .buckets import Bucket, make_bucket

_KEPT = 2


class Layouts:
    """The buckets of a plan, for sets of trained parameters. The last two are kept, and more of them as long as all
    together take no more than the gradients of all parameters.

    Args:
        runtime: executes the plan.
        members: the parameters. If one is trained that the plan leaves out, it is averaged exactly.
        max_nbytes: the maximum size of a bucket. Only one whose units share a parameter may be larger.
    """

    def __init__(self, runtime: Runtime, members: Members, max_nbytes: float) -> None:
        self._runtime, self._members, self._max_nbytes = runtime, members, max_nbytes
        self._planned = {name for unit in runtime.plan.units for name in unit.parameters}
        self._all_nbytes = sum(in_reals(form).nbytes for form in members.forms.values())
        self._known: dict[frozenset[str], list[Bucket]] = {}  # the last one is the present one

    def of(self, trained: frozenset[str]) -> list[Bucket]:
        """The buckets for a set of trained parameters, in the order in which they are launched."""
        buckets = self._known.pop(trained, None)
        if buckets is None:
            buckets = self._made(trained)
        self._known[trained] = buckets
        while len(self._known) > _KEPT and self._nbytes() > self._all_nbytes:
            del self._known[next(iter(self._known))]
        return buckets

    def close(self) -> None:
        """Free the buckets and their messages."""
        self._known.clear()

    def _made(self, trained: frozenset[str]) -> list[Bucket]:
        members, plan = self._members, self._runtime.plan
        if left_out := trained - self._planned:
            warnings.warn(
                f"gckernels: parameters are trained that the plan leaves out, and are averaged exactly: "
                f"{listed(left_out)}; to compress them, give a plan that has them to change_plan",
                stacklevel=2,
            )
        units = [unit for unit in plan.units if not trained.isdisjoint(unit.parameters)]
        present = trained.union(*(unit.parameters for unit in units))
        forms = {name: form for name, form in members.forms.items() if name in present}
        fitted = plan.with_units(fitted_units(units, forms, plan.span)[0])
        dtypes = {name: form.dtype for name, form in forms.items()}
        before = {(bucket.units, bucket.expected): bucket for buckets in self._known.values() for bucket in buckets}
        buckets = []
        for spec in cut_buckets(fitted, dtypes, self._max_nbytes):
            expected = trained.intersection(name for unit in spec.units for name in unit.plan.parameters)
            bucket = before.get((spec.units, expected))
            buckets.append(bucket or make_bucket(self._runtime, spec, members.references, forms, expected))
        return buckets

    def _nbytes(self) -> int:
        found = {id(bucket): bucket.vector.nbytes for buckets in self._known.values() for bucket in buckets}
        return sum(found.values())
