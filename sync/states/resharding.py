"""Conversion of saved residuals to another number of ranks, or to other programs.

The residuals of an encoding are a part of the gradients that has not been sent yet. Their sum over the ranks is one
vector of the whole unit, the *mass* of the encoding; each residual is added at its offset in the unit, multiplied by
its weight in the mean (:func:`~gckernels.sync.programs.residuals.encoded_regions`). Raw data is always a mean, so in
every program the weights of all ranks that encode an element add up to one. Each new rank therefore takes the mass of
those elements that it encodes, and the total unsent gradient is preserved, up to one rounding to fp32.

Decisions that are not obvious:

- No new rank gets the residual of one old rank. The data is distributed differently, so that residual has no meaning
  there. Ranks that encode the same elements must get the same residual. The norm of a mean is at most that of its
  terms, on which the error bounds of error feedback depend.
- A momentum is not a mass, but an average of the gradients that a rank has seen. Its mean over the ranks is the best
  estimate for a new rank, and preserves their mean, by which a velocity moves the parameters. The mass of a whole unit
  is a mean over the ranks, too, so both are converted in the same way, independently of each other.
- The default program depends on the number of ranks, a ring is made for one number, and roots may differ. So a job
  saves its plan, and the old residuals are read with the old plan. The mass of an encoding that the new program lacks
  is added to that of the first encoding. This makes no sense for a momentum, which is dropped.
- A rank that has only its own state keeps its own share of the mass: it divides by the weight of its new encoding.
  Where it now encodes other elements, or the same elements as another rank, the states of all ranks are needed.
- All ranks compute the same bits from the same list: in fp64, on the CPU, without fused operations.
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from ..plans.plan import Plan, UnitPlan
from ..programs.residuals import ENCODINGS, EncodedRegion
from ..programs.topology import Topology
from ..resources.feedback import KINDS
from .jobs import Job
from .layout import FACTORS, RankState, join_states, kept_regions, route


def reshard(job: Job, plan: Plan, topology: Topology, rank: int) -> RankState:
    """The residuals and factors with which a rank of a new job begins.

    Units with the same route (:func:`~.layout.route`) in both jobs keep their residuals unchanged.

    Args:
        job: the old job. If it has the state of one rank only, that must be ``rank``.
        plan: the new plan, with the same units and compressors; programs and roots may differ.
        topology: the new topology.
        rank: rank in the new job.

    Raises:
        ValueError: the plans do not fit, or the states of other ranks are needed.
    """
    check_fit(job.plan, plan)
    found: RankState = {kind: {} for kind in KINDS}
    for unit in plan.units:
        old = job.plan.by_key[unit.key]
        stays = route(old, job.topology) == route(unit, topology)
        own = job.feedback[rank] if stays else next(iter(job.feedback.values()))  # factors are the same on all ranks
        for kind in KINDS if stays else FACTORS:
            if unit.key in own[kind]:
                found[kind][unit.key] = own[kind][unit.key]
        if not stays:
            for kind, residual in _resharded(job, old, unit, topology, rank).items():
                found[kind][unit.key] = residual
    return found


def _resharded(job: Job, old: UnitPlan, unit: UnitPlan, topology: Topology, rank: int) -> dict[str, torch.Tensor]:
    """The new residuals of a unit on ``rank``, by kind, with its share of the old job's masses."""
    masses, encoded = job.masses(old), kept_regions(unit, topology, rank)
    if job.is_whole:
        displaced = {kind for kind in masses if kind not in encoded}
        shares = dict.fromkeys(encoded, 1.0)
    else:
        pieces = kept_regions(old, job.topology, rank)
        displaced = {kind for kind in masses if not _has_room(encoded.get(kind), pieces[kind])}
        shares = {kind: encoding.weight for kind, encoding in encoded.items()}
        if displaced and not all(_has_room(encoded.get(ENCODINGS[0]), pieces[kind]) for kind in displaced):
            raise ValueError(
                f"state: {unit.key}: the residuals of this rank alone do not fit its new program; pass the list of the "
                "states of all ranks instead"
            )
    add_to_first(masses, old, displaced, encoded)
    return {
        kind: join_states(
            (mass[:, encoded[kind].start : encoded[kind].stop] / shares[kind]).float(), encoded[kind].size
        )
        for kind, mass in masses.items()
    }


def _has_room(encoding: EncodedRegion | None, piece: EncodedRegion) -> bool:
    """Whether a rank alone can put the residual of ``piece`` into the residual of ``encoding``."""
    if encoding is None or encoding.copies > 1:
        return False
    return piece.start >= piece.stop or (encoding.start <= piece.start and piece.stop <= encoding.stop)


def check_fit(old_plan: Plan, new_plan: Plan) -> None:
    """Raise :class:`ValueError` unless both plans have the same units, with the same compressors."""
    before, after = old_plan.by_key, new_plan.by_key
    for key in [*before, *after]:
        if key not in after or key not in before:
            raise ValueError(f"state: {key} is a unit of the {'saved' if key in before else 'current'} plan only")
        old, new = before[key], after[key]
        for attribute, saved, current in (
            ("elements", old.numel, new.numel),
            ("compressor", old.compressor.name, new.compressor.name),
            ("states", old.compressor.traits.states, new.compressor.traits.states),
            ("feedback", old.feedback, new.feedback),
        ):
            if saved != current:
                raise ValueError(f"state: {key}: {attribute} in the saved plan: {saved}, in the current one: {current}")


def add_to_first(
    masses: dict[str, torch.Tensor], unit: UnitPlan, displaced: Collection[str], encoded: Collection[str]
) -> None:
    """Move the masses of the kinds ``displaced`` into the mass of the first encoding, in place.

    Only the last state is moved, the one that is encoded; momenta are dropped.
    """
    first = ENCODINGS[0]
    for kind in sorted(displaced):
        mass = masses.pop(kind)
        if first not in encoded:
            raise ValueError(f"state: {unit.key}: the current plan has no residual that could take the saved ones")
        if unit.encoder(kind).traits.conserves:
            if first not in masses:
                masses[first] = mass.new_zeros(unit.encoder(first).traits.states, unit.numel)
            masses[first][-1] += mass[-1]
