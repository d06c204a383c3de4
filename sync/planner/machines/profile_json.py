"""The format of profiles: JSON, with a version, and every field checked."""

from __future__ import annotations

import dataclasses
from typing import Any

from gckernels.method import MAX_JSON_DEPTH, too_deep

from ...programs.stages import StageKind
from ...programs.steps import KINDS, Level, Place
from ...programs.topology import Topology
from ..machine import Overheads, Shared
from .curves import CodecModel, Coefficients, CollectiveCurve, CopyCurve, Curve, ProfileError
from .profile import Profile, Stamp
from .records import Record, member

FORMAT, VERSION = "gckernels profile", 1

_CURVE = tuple(field.name for field in dataclasses.fields(Curve))
_COEFFICIENTS = tuple(field.name for field in dataclasses.fields(Coefficients))
_OVERHEADS = tuple(field.name for field in dataclasses.fields(Overheads))
_STAMP = tuple(field.name for field in dataclasses.fields(Stamp))
_CODEC = tuple(field.name for field in dataclasses.fields(CodecModel) if field.name != "coefficients")
_PROFILE = tuple(field.name for field in dataclasses.fields(Profile) if field.name != "assumptions")


def profile_to_json(profile: Profile) -> dict[str, Any]:
    """A profile as JSON."""
    topology = profile.topology
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": profile.name,
        "topology": {"machines": topology.machines, "devices": topology.devices},
        "computes_on": profile.computes_on.value,
        "cores": profile.cores,
        "overheads": dataclasses.asdict(profile.overheads),
        "collectives": [
            {"step": each.step, "level": each.level.value, "place": each.place.value} | _curve_to_json(each.curve)
            for each in profile.collectives
        ],
        "codecs": [_codec_to_json(each) for each in profile.codecs],
        "copies": [{"resource": each.resource.value} | _curve_to_json(each.curve) for each in profile.copies],
        "sharing": {level.value: share for level, share in profile.sharing.items()},
        "taken": dict(profile.taken),
        "left_out": list(profile.left_out),
        "stamp": dataclasses.asdict(profile.stamp) | {"hosts": list(profile.stamp.hosts)},
    }


def profile_from_json(given: object) -> Profile:
    """The profile that :func:`profile_to_json` has converted.

    Raises:
        ProfileError: it has another format or version, or something in it is not valid.
    """
    if too_deep(given):
        raise ProfileError(f"profile: more than {MAX_JSON_DEPTH} levels of nested lists and objects")
    head = (given.get("format"), given.get("version")) if isinstance(given, dict) else None
    if head != (FORMAT, VERSION):
        raise ProfileError(f"profile: expected format {FORMAT!r}, version {VERSION}; measure it with gckernels profile")
    record = Record("profile", given, ("format", "version", *_PROFILE))
    place = record.record("topology", ("machines", "devices"))
    overheads = record.record("overheads", _OVERHEADS)
    stamp = record.record("stamp", _STAMP)
    texts = {key: stamp.text(key) for key in _STAMP if key not in ("hosts", "seconds")}
    try:
        topology = Topology(place.integer("machines"), place.integer("devices"))
    except ValueError as error:
        raise ProfileError(f"profile: {error}") from error
    return Profile(
        name=record.text("name"),
        topology=topology,
        computes_on=record.member("computes_on", Shared),
        cores=record.number("cores"),
        overheads=Overheads(**{key: overheads.number(key) for key in _OVERHEADS}),
        collectives=tuple(map(_collective, record.records("collectives", ("step", "level", "place", *_CURVE)))),
        codecs=tuple(map(_codec, record.records("codecs", (*_CODEC, *_COEFFICIENTS)))),
        copies=tuple(
            CopyCurve(each.member("resource", Shared), _curve(each))
            for each in record.records("copies", ("resource", *_CURVE))
        ),
        sharing={
            member("profile: sharing", level, Level): share for level, share in record.named_numbers("sharing").items()
        },
        taken=record.named_numbers("taken"),
        left_out=record.texts("left_out"),
        stamp=Stamp(hosts=stamp.texts("hosts"), seconds=stamp.number("seconds"), **texts),
    )


def _curve_to_json(curve: Curve) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in vars(curve).items()}


def _curve(record: Record) -> Curve:
    points = record.numbers("nbytes"), record.numbers("wall_s"), record.numbers("cores_s")
    return Curve(*points, record.number_or_none("error"))


def _collective(record: Record) -> CollectiveCurve:
    step = record.text("step")
    if step not in KINDS:
        raise ProfileError(f"profile: step must be one of {', '.join(KINDS)}, got {step!r}")
    return CollectiveCurve(step, record.member("level", Level), record.member("place", Place), _curve(record))


def _codec_to_json(model: CodecModel) -> dict[str, Any]:
    values = {key: getattr(model, key) for key in _CODEC}
    values |= {"compressor": str(model.compressor), "work": model.work.value, "place": model.place.value}
    return values | dataclasses.asdict(model.coefficients)


def _codec(record: Record) -> CodecModel:
    return CodecModel(
        record.method("compressor"),
        record.member("work", StageKind),
        record.member("place", Place),
        Coefficients(**{key: record.number(key) for key in _COEFFICIENTS}),
        record.number("cores"),
        record.integer("max_units"),
        record.integer("max_elements"),
        record.integer("max_sources"),
        record.number_or_none("error"),
    )
