"""The plan in a report: the bytes of each layer with and without it, its ways to send, its units."""

from __future__ import annotations

from collections.abc import Sequence

from ..plans.numbers import percent, plural, three_digits, volume
from .data import EXACT, ReportData, UnitRow
from .html import NONE, Content, Markup, bar, breakable, percent_of, table, table_row, tag

COLOURS = 7  # colours in the style sheet; further ways share the last one
_FINEST = 1 / 80  # part of the width: smaller units of one way share a segment
_FEW = 12  # units that are shown without a filter


def plan(data: ReportData) -> Markup:
    """The pictures and tables of the plan."""
    classes = _classes(data)
    return tag(
        "figure",
        _bars(data, classes),
        _ways(data, classes),
        _units(data, classes),
        id="plan",
    )


def sentence(data: ReportData) -> str:
    """A sentence about the whole plan."""
    numel, nbytes = sum(unit.numel for unit in data.units), sum(unit.nbytes for unit in data.units)
    text = f"{plural(len(data.units), 'unit')}, {numel:,} elements, {volume(nbytes)} of gradients."
    if not data.compresses:
        return f"{text} Nothing is compressed."
    exact = sum(not unit.compressor for unit in data.units)
    return text + (f" {exact} of them are averaged exactly." if exact else "")


def _classes(data: ReportData) -> dict[str, str]:
    """The class of each way, which gives it its colour: the way that carries the largest gradients comes first."""
    nbytes: dict[str, int] = {}
    for unit in data.units:
        nbytes[unit.sent_by] = nbytes.get(unit.sent_by, 0) + unit.nbytes
    ways = sorted((label for label in nbytes if label != EXACT), key=lambda label: -nbytes[label])
    return {label: f"way-{min(number, COLOURS)}" for number, label in enumerate(ways, start=1)} | {EXACT: "way-exact"}


# -------------------------------------------------------------------- the bars


def _bars(data: ReportData, classes: dict[str, str]) -> Markup:
    """Two bars on one scale: the bytes that a rank sends in a step without the plan, and with it."""
    most = max(data.plain_nbytes, data.sent_nbytes)
    ways = list(classes)
    units = sorted(data.units, key=lambda unit: ways.index(unit.sent_by))
    plain = [(classes[unit.sent_by], unit.plain_nbytes) for unit in units]
    sent = [(classes[unit.sent_by], unit.sent_nbytes) for unit in units]
    rows: list[Content] = [_bar("without compression", plain, most)]
    if data.compresses:
        rows.append(_bar("with this plan", sent, most))
    return tag("div", rows, class_="bytes")


def _bar(name: str, parts: Sequence[tuple[str, float]], most: float) -> Markup:
    total, at = sum(nbytes for _, nbytes in parts), 0.0
    segments = []
    for kind, nbytes in _merged(parts, most * _FINEST):
        segments.append(
            tag("rect", x=percent_of(at, most), width=percent_of(nbytes, most), height=22, class_=f"segment {kind}")
        )
        at += nbytes
    picture = tag("svg", tag("title", f"{name}: {volume(total)}"), segments, width="100%", height=22, role="img")
    return tag("div", tag("span", name), tag("span", volume(total), class_="number"), picture, class_="sent")


def _merged(parts: Sequence[tuple[str, float]], finest: float) -> list[tuple[str, float]]:
    """The segments of a bar, of which those that are too fine to be seen join a neighbour of their class."""
    found: list[tuple[str, float]] = []
    for kind, nbytes in parts:
        if found and found[-1][0] == kind and min(found[-1][1], nbytes) < finest:
            found[-1] = (kind, found[-1][1] + nbytes)
        else:
            found.append((kind, nbytes))
    return found


# -------------------------------------------------------------------- the tables


def _ways(data: ReportData, classes: dict[str, str]) -> Markup:
    """A table of the ways to send, which is the legend, too."""
    rows = []
    for label, kind in classes.items():
        units = [unit for unit in data.units if unit.sent_by == label]
        if not units:
            continue
        plain, sent = sum(unit.plain_nbytes for unit in units), sum(unit.sent_nbytes for unit in units)
        cells = (f"{len(units):,}", size(sum(unit.nbytes for unit in units)), size(sent), _share(sent, plain))
        rows.append((plain, table_row(_named(kind, label), cells)))
    rows.sort(key=lambda each: -each[0])
    titles = ("way", "units", "gradients", "sent", "of plain")
    return table(titles, [each for _, each in rows], "Ways", class_="ways")


def _units(data: ReportData, classes: dict[str, str]) -> Markup:
    most = max((unit.plain_nbytes for unit in data.units), default=0.0)
    titles = [("unit", "name"), ("elements", "elements"), ("gradient", "gradient"), ("way", "way"), ("sent", "sent")]
    titles.append(("of plain", "share"))
    head = [tag("th", title, scope="col", class_=f"c-{kind}") for title, kind in titles]
    head.insert(-2, tag("td", class_="c-bar"))
    rows = [_unit(unit, classes, most) for unit in data.units]
    whole = tag(
        "table",
        tag("caption", "Units"),
        tag("thead", tag("tr", head)),
        tag("tbody", rows),
        class_="units",
        data_few=_FEW,
    )
    search = tag(
        "label",
        tag("span", "Filter units"),
        tag("input", type="search", placeholder="name or way", autocomplete="off"),
        class_="filter script",
    )
    more = tag("button", "", type="button", class_="more script", hidden=True)
    return Markup((search if len(rows) > _FEW else "") + whole + more)


def _unit(unit: UnitRow, classes: dict[str, str], most: float) -> Markup:
    kind = classes[unit.sent_by]
    sizes = bar(("behind", unit.plain_nbytes), (kind, unit.sent_nbytes), most=most)
    label = [_named(kind, unit.sent_by)]
    if unit.compressor and unit.feedback != 1:
        label.append(tag("small", f"decay {unit.feedback:g}" if unit.feedback else "no feedback"))
    below = _named(kind, unit.sent_by, "below")
    return tag(
        "tr",
        tag("th", breakable(unit.name), below, scope="row", class_="c-name"),
        tag("td", f"{unit.numel:,}", class_="c-elements", data_sort=unit.numel),
        tag("td", size(unit.nbytes), class_="c-gradient", data_sort=unit.nbytes),
        tag("td", label, class_="c-way"),
        tag("td", sizes, class_="c-bar", data_sort=unit.plain_nbytes),
        tag("td", size(unit.sent_nbytes), class_="c-sent", data_sort=unit.sent_nbytes),
        tag("td", _share(unit.sent_nbytes, unit.plain_nbytes), class_="c-share"),
    )


def size(nbytes: float) -> str:
    """A size in the unit that suits it: small units of a plan have a thousandth of a MB."""
    for unit, name in ((1e6, "MB"), (1e3, "kB")):
        if nbytes >= 0.9995 * unit:
            return f"{three_digits(nbytes / unit)} {name}"
    return f"{nbytes:,.0f} B"


def _named(kind: str, label: str, place: str = "") -> Markup:
    """The name of a way behind its colour."""
    return tag("span", tag("i", class_=f"chip {kind}"), label, class_=f"named {place}".rstrip())


def _share(sent: float, plain: float) -> str:
    return percent(sent / plain) if plain else NONE
