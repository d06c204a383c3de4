"""HTML and SVG as text whose contents are escaped, and pages that load nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Iterable

NONE = "\N{EN DASH}"
"""Stands in a cell that has no value."""

VOID = ("br", "meta", "wbr")
"""Elements that have no end."""


class Markup(str):
    """Text that is HTML already. Any other text is escaped."""


Content = str | Iterable["Content"] | None
"""The contents of an element: text, markup, several of them, or nothing."""


def text_of(content: Content) -> str:
    """The contents of an element as HTML."""
    if content is None:
        return ""
    if isinstance(content, Markup):
        return content
    if isinstance(content, str):
        return html.escape(content, quote=False)
    return "".join(map(text_of, content))


def tag(name: str, /, *content: Content, **attributes: str | float | bool | None) -> Markup:
    """An element.

    Args:
        name: the name of the element.
        content: its contents.
        attributes: its attributes. ``class_`` and ``for_`` stand for the words that Python reserves, and an underscore
            for a hyphen. ``None`` and ``False`` leave an attribute out, ``True`` gives it no value.
    """
    parts = [name]
    for key, value in attributes.items():
        written = key.rstrip("_").replace("_", "-")
        if value is True:
            parts.append(written)
        elif value is not None and value is not False:
            parts.append(f'{written}="{html.escape(_plain(value))}"')
    opened = f"<{' '.join(parts)}>"
    return Markup(opened if name in VOID else f"{opened}{text_of(content)}</{name}>")


def percent_of(part: float, whole: float) -> str:
    """A position or a width in SVG, such as ``"12.5%"``."""
    return f"{_plain(round(100 * part / whole, 4))}%" if whole else "0%"


def breakable(name: str) -> Markup:
    """A name of a parameter, which may break after its dots."""
    return Markup("<wbr>".join(html.escape(part, quote=False) for part in name.replace(".", ".\0").split("\0")))


def unbroken(text: str) -> str:
    """A text in which no line breaks between a number and its unit."""
    return re.sub(r"(?<=\d) (?=(?:ms|s|kB|MB|GB|TB|%)(?!\w))", "\N{NO-BREAK SPACE}", text)


def details(summary: str, *content: Content) -> Markup:
    """Contents that are shown when their summary is clicked."""
    return tag("details", tag("summary", summary), *content)


def bar(*parts: tuple[str, float], most: float) -> Markup:
    """A bar for a cell of a table, whose parts lie over one another.

    Args:
        parts: the class and the length of each.
        most: the length that takes the whole width.
    """
    shown = [tag("rect", width=percent_of(length, most), height=8, rx=1, class_=kind) for kind, length in parts]
    return tag("svg", shown, width="100%", height=8, aria_hidden="true")


def table_row(title: Content, cells: Iterable[Content], **attributes: str | None) -> Markup:
    """A row of a table, which its first cell names."""
    return tag("tr", tag("th", title, scope="row"), [tag("td", cell) for cell in cells], **attributes)


def table(head: Iterable[str], rows: Iterable[Markup], caption: str | None = None, **attributes: str) -> Markup:
    """A table.

    Args:
        head: the titles of its columns; columns of bars have none.
        caption: its title.
        attributes: its attributes.
    """
    titles = [tag("th", title, scope="col") if title else tag("td") for title in head]
    named = None if caption is None else tag("caption", caption)
    return tag("table", named, tag("thead", tag("tr", titles)), tag("tbody", *rows), **attributes)


def wide(*content: Content) -> Markup:
    """Contents that scroll if they are wider or higher than their place."""
    return tag("div", *content, class_="wide", tabindex=0)


def page(title: str, style: str, script: str, *body: Content) -> str:
    """A whole page. Its policy lets a browser run and apply nothing but the given style and script, and load nothing.

    Args:
        style: its style sheet.
        body: its contents.
    """
    allowed = {"default-src": "'none'", "style-src": _source(style), "script-src": _source(script)}
    allowed |= {"base-uri": "'none'", "form-action": "'none'"}
    policy = "; ".join(f"{kind} {sources}" for kind, sources in allowed.items())
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    whole = tag("html", head, tag("body", *body, tag("script", Markup(script))), lang="en")
    return f"<!doctype html>\n{whole}\n"


def _source(text: str) -> str:
    """The source by which a policy allows a style or a script: its hash."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _plain(value: str | float) -> str:
    return f"{value:.10g}" if isinstance(value, float) else str(value)
