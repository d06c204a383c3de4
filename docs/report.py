"""Draw ``report.png``: the first part of a report's page, in a headless Chromium (``python -m docs.report``).

The training is that of the tests (``tests/support/reports.py``), with figures that were chosen for it. So the picture
changes only with the page, and with the fonts and the release of the browser.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from gckernels.sync.reporting.page import render

FOLDER = Path(__file__).parent
WIDTH, HEIGHT = 1280, 2105  # pixels, down to the table of ways
COLOURS = 256  # enough for the page, in less than half of the bytes


def main() -> None:
    """Write the picture, if there is a Chromium."""
    sys.path.insert(0, str(FOLDER.parent / "tests" / "support"))
    from PIL import Image

    from browser import browser, chromium
    from reports import example

    if (path := chromium()) is None:
        raise SystemExit("there is no Chromium; on Debian: apt-get install chromium")
    with tempfile.TemporaryDirectory() as folder, browser(path) as running:
        page = Path(folder, "report.html")
        page.write_text(render(example()), encoding="utf-8")
        picture = Path(folder, "report.png")
        running.open(page, WIDTH, HEIGHT).picture(picture, whole=False)
        with Image.open(picture) as shown:
            shown.convert("RGB").quantize(COLOURS).save(FOLDER / "report.png", optimize=True)


if __name__ == "__main__":
    main()
