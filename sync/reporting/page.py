"""Reports as HTML: one file, which needs no network and no other file."""

from __future__ import annotations

from importlib import resources

from . import plan_picture, run_picture, sections
from .data import ReportData
from .html import Content, Markup, page, tag

_NO_RUN = (
    "Nothing to show yet: the first figures are those of ten steps. Where DDP averages everything without a hook, "
    "steps are counted only for listeners."
)
_NO_STEP = "No step has been recorded yet. Steps that DDP averages without a hook have no stages."


def render(data: ReportData) -> str:
    """The report as the text of an HTML file.

    It holds its style and its script, loads nothing, and its policy keeps it from doing so. Without a script everything
    is visible, and only filtering and reading values at the pointer are missing.

    Args:
        data: the training that it shows.
    """
    files = resources.files(__package__)
    style, script = (files.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    parts = [_section("Plan", plan_picture.sentence(data), plan_picture.plan(data))]
    if data.traced is not None and data.traced.stages:
        about = sections.step_sentence(data.traced, data.fingerprint)
        parts.insert(0, _section("One step", about, sections.lanes(data.traced)))
    else:
        parts.insert(0, _section("One step", _NO_STEP, None))
    run, decided = run_picture.run(data), sections.decisions(data) if data.decisions else None
    about = _run_sentence(data) if run is not None or decided is not None else _NO_RUN
    parts.insert(0, _section("The run", about, run, decided))
    if (table := sections.alternatives(data)) is not None:
        parts.append(_section("Alternatives", sections.prediction_sentence(data), table))
    title = f"gckernels: {data.model} at step {data.step:,}"
    return page(title, style, script, sections.head(data), tag("main", parts), sections.foot(data))


def _run_sentence(data: ReportData) -> str:
    if not data.decisions:
        return "The plan has not been changed."
    if len(data.decisions) == 1:
        return "The plan was decided once."
    return f"There were {len(data.decisions)} decisions about the plan; their numbers are those in the picture."


def _section(title: str, sentence: str, *content: Content) -> Markup:
    about = tag("div", tag("h2", title), tag("p", sentence), class_="about")
    shown = [each for each in content if each is not None]
    return tag("section", about, tag("div", shown, class_="body") if shown else None)
