"""The format of profiles: JSON, with a version, and every field checked."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from gckernels.compressor import Compressor, from_spec

from ...plans.json_files import Entry, shown
from ...programs.stages import StageKind
from ...programs.steps import KINDS, Level, Place
from ...programs.topology import Topology
from .curves import CodecModel, Coefficients, CollectiveCurve, CopyCurve, Curve, ProfileError
from .machine import Overheads, Shared
from .profile import MEASURE_AGAIN, Profile, Stamp

FORMAT, VERSION = "gckernels profile", 1

_CURVE = tuple(field.name for field in dataclasses.fields(Curve))
_COEFFICIENTS = tuple(field.name for field in dataclasses.fields(Coefficients))
_OVERHEADS = tuple(field.name for field in dataclasses.fields(Overheads))
_STAMP = tuple(field.name for field in dataclasses.fields(Stamp))
_CODEC = tuple(field.name for field in dataclasses.fields(CodecModel) if field.name != "coefficients")
_MORE = ("memory_nbytes",)
_PROFILE = tuple(field.name for field in dataclasses.fields(Profile) if field.name not in ("assumptions", *_MORE))


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
        "memory_nbytes": profile.memory_nbytes,
    }


def profile_from_json(record: object) -> Profile:
    """The profile that :func:`profile_to_json` has converted.

    Args:
        record: the JSON value, or its entry in a file.

    Raises:
        ProfileError: it has another format or version, or something in it is not valid. For an entry, its own error.
    """
    document = record if isinstance(record, Entry) else Entry(record, "profile", ProfileError, MEASURE_AGAIN)
    head = document.fields(("format", "version"), None)
    head["format"].choice((FORMAT,))
    head["version"].integer(VERSION, VERSION)
    fields = document.fields(("format", "version", *_PROFILE), _MORE)
    place = fields["topology"].fields(("machines", "devices"))
    stamp = fields["stamp"].fields(_STAMP)
    texts = {key: stamp[key].text() for key in _STAMP if key not in ("hosts", "seconds")}
    values: dict[str, Any] = {
        "name": fields["name"].text(),
        "topology": fields["topology"].built(
            functools.partial(Topology, place["machines"].integer(), place["devices"].integer())
        ),
        "computes_on": fields["computes_on"].member(Shared),
        "cores": fields["cores"].number(),
        "overheads": Overheads(**_numbers(fields["overheads"], _OVERHEADS)),
        "collectives": tuple(map(_collective, fields["collectives"].items())),
        "codecs": tuple(map(_codec, fields["codecs"].items())),
        "copies": tuple(map(_copy, fields["copies"].items())),
        "sharing": {
            Level(level): each.number()
            for level, each in fields["sharing"].fields((), [level.value for level in Level]).items()
        },
        "taken": {name: each.number() for name, each in fields["taken"].mapping().items()},
        "left_out": _texts(fields["left_out"]),
        "stamp": Stamp(hosts=_texts(stamp["hosts"]), seconds=stamp["seconds"].number(), **texts),
        "memory_nbytes": fields["memory_nbytes"].maybe(Entry.number) if "memory_nbytes" in fields else None,
    }
    return document.built(lambda: Profile(**values))


def _texts(entry: Entry) -> tuple[str, ...]:
    return tuple(each.text() for each in entry.items())


def _numbers(entry: Entry, keys: tuple[str, ...]) -> dict[str, float]:
    fields = entry.fields(keys)
    return {key: fields[key].number() for key in keys}


def _curve_to_json(curve: Curve) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in vars(curve).items()}


def _curve(entry: Entry, fields: dict[str, Entry]) -> Curve:
    nbytes, wall_s, cores_s = (_points(fields[key]) for key in ("nbytes", "wall_s", "cores_s"))
    return entry.built(functools.partial(Curve, nbytes, wall_s, cores_s, fields["error"].maybe(Entry.number)))


def _points(entry: Entry) -> tuple[float, ...]:
    return tuple(each.number() for each in entry.items())


def _collective(entry: Entry) -> CollectiveCurve:
    fields = entry.fields(("step", "level", "place", *_CURVE))
    step = fields["step"].choice(KINDS)
    return CollectiveCurve(step, fields["level"].member(Level), fields["place"].member(Place), _curve(entry, fields))


def _copy(entry: Entry) -> CopyCurve:
    fields = entry.fields(("resource", *_CURVE))
    return CopyCurve(fields["resource"].member(Shared), _curve(entry, fields))


def _codec_to_json(model: CodecModel) -> dict[str, Any]:
    values = {key: getattr(model, key) for key in _CODEC}
    values |= {"compressor": str(model.compressor), "work": model.work.value, "place": model.place.value}
    return values | dataclasses.asdict(model.coefficients)


def _codec(entry: Entry) -> CodecModel:
    fields = entry.fields((*_CODEC, *_COEFFICIENTS))
    coefficients = {key: fields[key].number() for key in _COEFFICIENTS}
    return entry.built(
        functools.partial(
            CodecModel,
            _method(fields["compressor"]),
            fields["work"].member(StageKind),
            fields["place"].member(Place),
            Coefficients(**coefficients),
            fields["cores"].number(),
            fields["max_units"].integer(),
            fields["max_elements"].integer(),
            fields["max_sources"].integer(),
            fields["error"].maybe(Entry.number),
        )
    )


def _method(entry: Entry) -> Compressor:
    try:
        return from_spec(entry.text())
    except ValueError as error:
        entry.refuse("a compressor of this release", f"{shown(entry.value)}: {error}")
