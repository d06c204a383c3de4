"""Reports in a browser: no error in the console, no request, no overflow, on phones and large screens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from browser import browser, chromium
from gckernels.sync.reporting.page import render
from reports import example

pytestmark = pytest.mark.skipif(chromium() is None, reason="there is no Chromium; on Debian: apt-get install chromium")
SIZES = ((390, False), (1440, True))


@pytest.fixture(scope="module")
def running():
    with browser(chromium()) as started:
        yield started


def _with_long_names(data):
    """The data with names that do not fit a phone, and decisions up to the last step."""
    program = "ReduceScatter(intra)+AllGather(inter)+AllGather(intra) on the host"
    units = [replace(each, name=f"{each.name}+" * 4, program=program) for each in data.units]
    decisions = [replace(data.decisions[2], step=step) for step in range(0, data.step + 1, 400)]
    lanes = tuple(f"host-{name}" for name in data.traced.lanes)
    traced = replace(data.traced, lanes=lanes)
    prediction = replace(data.prediction, policy="all:" + "y" * 60)
    return replace(
        data, model="x" * 80, units=tuple(units), decisions=tuple(decisions), traced=traced, prediction=prediction
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    data = example()
    little = replace(data, units=data.units[:1], prediction=None, decisions=(), samples=(), traced=None)
    (folder / "long.html").write_text(render(_with_long_names(data)), encoding="utf-8")
    (folder / "report.html").write_text(render(data), encoding="utf-8")
    (folder / "little.html").write_text(render(little), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", ["report.html", "little.html", "long.html"])
@pytest.mark.parametrize(("width", "dark"), SIZES)
def test_pages_open_without_an_error(running, files, name, width, dark):
    page = running.open(files / name, width, dark=dark)
    assert page.value("document.documentElement.scrollWidth") <= width
    red, _, _ = page.value("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)")
    assert (red < 60) == dark
    assert page.requests == [(files / name).as_uri()] and page.problems == []


def test_errors_would_be_seen(running, tmp_path):
    (tmp_path / "broken.html").write_text('<!doctype html><img src="missing.png"><script>unknown()</script>')
    page = running.open(tmp_path / "broken.html", 1440)
    assert any("unknown is not defined" in problem for problem in page.problems) and len(page.requests) == 2


def test_values_are_read_at_the_pointer(running, files):
    page = running.open(files / "report.html", 1440)
    x, y = page.value(
        "(() => { const box = document.querySelector('.plot > svg:last-child').getBoundingClientRect();"
        "return [box.left + box.width * 2000 / 8200, box.top + 60]; })()"
    )
    page.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    assert page.value("document.querySelector('.readout').textContent").startswith("Step 2,000 · time of a step")
    assert page.problems == []


def test_units_are_sorted_and_filtered(running, files):
    page = running.open(files / "report.html", 1440)
    rows = "[...document.querySelectorAll('.units tbody tr')].filter(row => !row.hidden)"
    assert page.value(f"{rows}.length") == 12
    page.click(".units thead th:nth-child(2) button")
    sizes = page.value(f"{rows}.map(row => Number(row.cells[1].dataset.sort))")
    assert sizes == sorted((unit.numel for unit in example().units), reverse=True)[:12]
    page.value("document.querySelector('.filter input').focus()")
    page.call("Input.insertText", text="qkv exact")
    found = page.value(f"{rows}.map(row => row.cells[0].firstChild.textContent + row.textContent)")
    assert len(found) == 6 and all("qkv.bias" in text for text in found)
    page.value("document.querySelector('.filter input').select()")
    page.call("Input.insertText", text="")
    page.click(".more")
    assert page.value(f"{rows}.length") == len(example().units) and page.problems == []


def test_everything_is_visible_without_a_script(running, files):
    page = running.open(files / "report.html", 1440, script=False)
    root = page.call("DOM.getDocument")["root"]["nodeId"]
    nodes = page.call("DOM.querySelectorAll", nodeId=root, selector=".units tbody tr:not([hidden])")["nodeIds"]
    assert len(nodes) == len(example().units)
    for selector in (".filter", ".more", ".readout"):
        node = page.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        with pytest.raises(RuntimeError, match="box model"):
            page.call("DOM.getBoxModel", nodeId=node)
    assert page.problems == []
