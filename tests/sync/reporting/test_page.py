"""The page of a report is one file that loads nothing, and shows everything that its data has."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from gckernels.sync.plans.numbers import volume
from gckernels.sync.reporting.html import VOID, breakable, tag, unbroken
from gckernels.sync.reporting.page import render
from reports import example

EMPTY = {"prediction": None, "decisions": (), "samples": (), "traced": None}
FEATURES = [{}, EMPTY, *({name: value} for name, value in EMPTY.items())]


class Reader(HTMLParser):
    """Reads a page: its elements, and the text of each kind. Elements that are not closed in order raise."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, str] = {}

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name not in VOID:
            self.open.append(name)

    def handle_endtag(self, name):
        assert self.open.pop() == name

    def handle_data(self, text):
        if self.open:
            self.texts[self.open[-1]] = self.texts.get(self.open[-1], "") + text

    @classmethod
    def of(cls, page: str) -> Reader:
        reader = cls()
        reader.feed(page)
        assert reader.open == []
        return reader

    @property
    def text(self) -> str:
        return "".join(text for name, text in self.texts.items() if name not in ("style", "script"))


@pytest.mark.parametrize("changes", FEATURES, ids=lambda changes: " ".join(changes) or "everything")
def test_every_part_may_be_missing(changes):
    data = replace(example(1), **changes)
    reader = Reader.of(render(data))
    headings = reader.texts["h2"]
    assert ("No step has been recorded yet" in reader.text) == (data.traced is None)
    assert ("Alternatives" in headings) == (data.prediction is not None)
    assert ("Nothing to show yet" in reader.text) != bool(data.samples or data.decisions)
    assert all(title in headings for title in ("The run", "One step", "Plan"))


def test_everything_is_shown():
    data = example(2)
    reader = Reader.of(render(data))
    assert data.prediction is not None and data.traced is not None
    shown = {unit.name for unit in data.units} | {row.text for row in data.decisions} | set(data.traced.lanes)
    shown |= {unbroken(row.short) for row in data.decisions}
    shown |= {row.policy for row in data.prediction.alternatives} | {volume(data.sent_nbytes)}
    sent_nbytes = [sum(stage.sent_nbytes for stage in data.traced.stages if stage.lane == lane) for lane in (1, 2, 4)]
    shown |= {*map(volume, sent_nbytes)}
    assert {each for each in shown if each not in reader.text} == set()


def test_nothing_is_loaded_and_nothing_else_is_run():
    reader = Reader.of(render(example()))
    names = {name for name, _ in reader.elements}
    assert names.isdisjoint({"link", "img", "iframe", "object", "embed", "base", "form", "audio", "video", "image"})
    attributes = [pair for _, each in reader.elements for pair in each.items()]
    assert [pair for pair in attributes if pair[0] in ("style", "src") or pair[0].startswith("on")] == []
    assert [value for name, value in attributes if name == "href" and not value.startswith("#")] == []
    assert re.search(r"url\(|@import", reader.texts["style"]) is None
    assert re.search(r"https?://(?!www\.w3\.org/2000/svg)|fetch\(|import\(", reader.texts["script"]) is None


def test_the_policy_allows_the_style_and_the_script_alone():
    reader = Reader.of(render(example(1)))
    (policy,) = (each["content"] for name, each in reader.elements if each.get("http-equiv") is not None)
    allowed = dict(part.split(" ", 1) for part in policy.split("; "))
    assert allowed.pop("default-src") == "'none'"
    for kind in ("style", "script"):
        digest = hashlib.sha256(reader.texts[kind].encode()).digest()
        assert allowed[f"{kind}-src"] == f"'sha256-{base64.b64encode(digest).decode()}'"


def test_names_cannot_become_elements():
    hostile = "</title><script>alert(\"&1\")</script><b onclick='x'>"
    data = example(1)
    decisions = (replace(data.decisions[0], text=hostile, short=hostile, policy=hostile),)
    units = (replace(data.units[0], name=hostile, compressor=hostile), *data.units[1:])
    reader = Reader.of(render(replace(data, model=hostile, units=units, decisions=decisions)))
    assert reader.text.count('alert("&1")') >= 4
    assert sum(name == "script" or "onclick" in attributes for name, attributes in reader.elements) == 1


def test_headlines_say_whether_times_are_measured():
    data = example(1)
    assert "Steps are 3" in render(data)
    predicted = replace(data, samples=(), decisions=())
    assert "Steps are predicted to be 2.88 times as fast" in render(predicted)
    assert "Gradients are sent with" in render(replace(predicted, prediction=None))
    slow = replace(data.prediction, step_s=2 * data.prediction.none_s)
    assert "2.00 times as slow" in render(replace(predicted, prediction=slow))


def test_plans_that_compress_nothing_say_so():
    data = example(1)
    exact = tuple(
        replace(each, compressor="", program="allreduce", sent_nbytes=each.plain_nbytes) for each in data.units
    )
    text = Reader.of(render(replace(data, units=exact))).text
    assert "Nothing is compressed" in text and "fewer bytes" not in text
    decided = replace(data, units=exact, decisions=(replace(data.decisions[0], policy="none"),))
    assert "No compression was worth it so far" in render(decided)
    assert "nobody to average with" in render(replace(data, units=exact, ranks=1))


def test_units_without_bytes_are_shown():
    """One rank sends nothing, and a parameter may be empty."""
    data = example(1)
    units = tuple(replace(each, numel=0, nbytes=0, sent_nbytes=0.0, plain_nbytes=0.0) for each in data.units)
    assert "nan" not in Reader.of(render(replace(data, units=units))).text


def test_attributes_and_contents_are_escaped():
    assert tag("p", "a<b", ["&", tag("br")], title='"<', hidden=True, lang=None) == (
        '<p title="&quot;&lt;" hidden>a&lt;b&amp;<br></p>'
    )
    assert breakable("a.b<c.d") == "a.<wbr>b&lt;c.<wbr>d"


def test_a_step_of_a_plan_that_ran_before_is_named():
    data = example(1)
    assert "Step 8,191. From the first gradient" in Reader.of(render(data)).text
    old = replace(data, traced=replace(data.traced, plan_fingerprint="0" * 64))
    assert "Step 8,191, of a plan that ran before. From" in Reader.of(render(old)).text


def test_numbers_stay_with_their_units():
    assert unbroken("60.0 ms of it, 31 % longer") == "60.0\N{NO-BREAK SPACE}ms of it, 31\N{NO-BREAK SPACE}% longer"


def test_a_decision_without_a_short_text_shows_the_one_of_the_log():
    data = example(1)
    reader = Reader.of(render(replace(data, decisions=(replace(data.decisions[0], short="", text="as in the log"),))))
    assert "as in the log" in reader.text and "In the log" not in reader.text
