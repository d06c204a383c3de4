"""Profiles of machines that tests need not measure."""

from __future__ import annotations

from gckernels import from_spec
from gckernels.planner.machines.curves import CodecModel, Coefficients, CollectiveCurve, CopyCurve, Curve
from gckernels.planner.machines.machine import Overheads, Shared
from gckernels.planner.machines.profile import Profile, Stamp
from gckernels.sync import Topology
from gckernels.sync.programs import Level, Place
from gckernels.sync.programs.stages import StageKind


def measured_machine(error: float, latency_s: float = 1e-4) -> Profile:
    """A profile of two ranks on slow links, all of whose measurements have an error."""
    sizes = (1e3, 1e5, 1e7)
    curve = Curve(sizes, tuple(latency_s + 1e-8 * size for size in sizes), tuple(1e-9 * size for size in sizes), error)
    per_element = Coefficients(1e-5, 2e-6, 1e-9, source_unit_s=1e-6, source_element_s=2e-9)
    return Profile(
        name="two ranks",
        topology=Topology(2),
        computes_on=Shared.CORES,
        cores=1.0,
        overheads=Overheads(1e-5, 2e-6, 2e-5, 5e-6),
        collectives=tuple(
            CollectiveCurve(kind, Level.FLAT, Place.DEVICE, curve) for kind in ("AllReduce", "AllGather", "AllToAll")
        ),
        codecs=tuple(
            CodecModel(from_spec(spec), work, Place.DEVICE, per_element, 0.9, 128, 1 << 24, 2, error)
            for spec in ("BlockQuant(bits=4)", "Identity")
            for work in (StageKind.ENCODE, StageKind.DECODE, StageKind.RECODE)
        ),
        copies=(CopyCurve(Shared.CORES, Curve((1e3, 1e6), (1e-6, 1e-4), (1e-6, 1e-4), error)),),
        sharing={Level.FLAT: 0.8},
        taken={"collective": 1.5},
        left_out=(),
        stamp=Stamp(("a", "b"), "cpu", "gloo", "2.11", "0.1", "2026-01-01T00:00:00", 60.0),
    )
