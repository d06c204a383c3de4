"""What a job of one size has saved, for a job of another size.

What the residuals of an encoding hold is what the mean has not been given yet. Added up over the ranks, each at its
place and times its weight (:func:`~gckernels.sync.programs.residuals.encoded_regions`), it is one vector of the whole
unit, the encoding's *mass*. Raw data is always a mean: whatever the program, the weights of all ranks that encode an
element add up to one. So a rank of the new job keeps of the mass what it encodes, and the total stays what it was, to
one rounding to fp32.

Decisions that are not obvious:

- Nobody gets the residual of one old rank. The data is dealt out anew, so it would mean nothing there; ranks that keep
  the same must get the same; and the mean has no larger a norm than what it is the mean of, on which bounds on the
  error of error feedback depend.
- A momentum is no mass, but an average of gradients that a rank has seen. Its mean over the ranks is the best guess of
  what a new rank would have, and keeps their mean, by which a velocity moves the parameters. A mean over the ranks is
  what the mass of a whole unit is, so states of both kinds are treated alike, each for itself.
- The default program depends on the number of ranks, a ring is made for one, a root may be another one. So a job
  saves its plan, and the old residuals are read with the old plan. What belongs to an encoding that the new program
  lacks is added to its first one: a mass fits everywhere. A momentum does not, and is left out there.
- A rank that has its own state alone keeps its own part of the mass: what it encodes now, it divides by what that is
  worth in the mean. Where it encodes something else now, or the same as another rank, the others' states are needed.
- All ranks work out the same from the same list, to the bit: in fp64, on the CPU, no two operations in one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from ..plans.plan import Plan, UnitPlan
from ..programs.residuals import EncodedRegion
from ..programs.steps import Collective, Level
from ..programs.topology import Topology
from ..resources.feedback import ENCODINGS, KINDS
from .jobs import Job
from .remembered import FACTORS, Remembered, joined, kept


def reshard(job: Job, plan: Plan, topology: Topology, rank: int) -> Remembered:
    """The residuals and factors that a rank takes over from a job: its own, unchanged, of units that go the same way.

    Args:
        job: the old one, of another size, or with other programs. If it is what one rank has saved, that rank.
        plan: the new one: the same units with the same compressors; their programs and roots may differ.
        topology: of the new job.
        rank: of the new job.

    Raises:
        ValueError: the plans do not fit, or the states of other ranks would be needed.
    """
    check_fit(job.plan, plan)
    before = {unit.key: unit for unit in job.plan.units}
    found: Remembered = {kind: {} for kind in KINDS}
    for unit in plan.units:
        old = before[unit.key]
        stays = way(old, job.topology) == way(unit, topology)
        own = job.feedback[rank] if stays else next(iter(job.feedback.values()))  # factors are the same on all ranks
        for kind in KINDS if stays else FACTORS:
            if unit.key in own[kind]:
                found[kind][unit.key] = own[kind][unit.key]
        if not stays:
            for kind, residual in _handed_on(job, old, unit, topology, rank).items():
                found[kind][unit.key] = residual
    return found


def way(unit: UnitPlan, topology: Topology) -> Any:
    """Equal where all ranks encode the same of a unit, in the same order."""
    levels = {step.level for step in unit.program if isinstance(step, Collective)}
    return unit.program, unit.root, topology.world_size if levels <= {Level.FLAT} else topology


def _handed_on(job: Job, old: UnitPlan, unit: UnitPlan, topology: Topology, rank: int) -> dict[str, torch.Tensor]:
    """The residuals of a unit, by kind, that give the mean what those of the old job would have given it."""
    masses, encoded = job.masses(old), kept(unit, topology, rank)
    if job.is_whole:
        homeless = {kind for kind in masses if kind not in encoded}
        shares = dict.fromkeys(encoded, 1.0)
    else:
        pieces = kept(old, job.topology, rank)
        homeless = {kind for kind in masses if not _has_room(encoded.get(kind), pieces[kind])}
        shares = {kind: encoding.weight for kind, encoding in encoded.items()}
        if homeless and not all(_has_room(encoded.get(ENCODINGS[0]), pieces[kind]) for kind in homeless):
            raise ValueError(
                f"state: {unit.key}: this rank's residuals have no place in its program now; a list of the states of "
                "all ranks can be loaded"
            )
    _gather_in_first(masses, old, homeless, encoded)
    return {
        kind: joined((mass[:, encoded[kind].start : encoded[kind].stop] / shares[kind]).float(), encoded[kind].size)
        for kind, mass in masses.items()
    }


def _has_room(encoding: EncodedRegion | None, piece: EncodedRegion) -> bool:
    """Whether a rank can keep by itself, in the residual of ``encoding``, what was kept of ``piece``."""
    if encoding is None or encoding.copies > 1:
        return False
    return piece.start >= piece.stop or (encoding.start <= piece.start and piece.stop <= encoding.stop)


def check_fit(old_plan: Plan, new_plan: Plan) -> None:
    """Raise :class:`ValueError` unless what is remembered under one plan can be handed on to the other."""
    before, after = ({unit.key: unit for unit in plan.units} for plan in (old_plan, new_plan))
    for key in [*before, *after]:
        if key not in after or key not in before:
            raise ValueError(f"state: {key} is a unit of {'that' if key in before else 'this'} plan only")
        old, new = before[key], after[key]
        for what, was, now in (
            ("elements", old.numel, new.numel),
            ("compressor", old.compressor.name, new.compressor.name),
            ("states", old.compressor.states, new.compressor.states),
            ("feedback", old.feedback, new.feedback),
        ):
            if was != now:
                raise ValueError(f"state: {key}: {what} of that plan: {was}, of this one: {now}")


def _gather_in_first(
    masses: dict[str, torch.Tensor], unit: UnitPlan, homeless: Collection[str], encoded: Mapping[str, EncodedRegion]
) -> None:
    """Add the masses of encodings that cannot have them any more to that of the first, the state that is encoded."""
    first = ENCODINGS[0]
    for kind in sorted(homeless):
        mass = masses.pop(kind)
        if first not in encoded:
            raise ValueError(f"state: {unit.key}: the residuals of that plan have no place in this one")
        if unit.encoder(kind).conserves:
            if first not in masses:
                masses[first] = mass.new_zeros(unit.encoder(first).states, unit.numel)
            masses[first][-1] += mass[-1]
