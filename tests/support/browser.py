"""A headless Chromium for tests of pages, driven through two pipes by its DevTools protocol.

It needs no other package. Pages get the width, the colours and the touches of a device, and everything that a page
writes to its console, throws or requests is kept.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

LIMIT_S = 60.0  # for one answer, on a busy machine
_FLAGS = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-extensions",
        "--no-first-run",
    ),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--mute-audio"),
    *("--no-default-browser-check", "--disable-sync", "--remote-debugging-pipe"),
)


def chromium() -> str | None:
    """The path of an installed Chromium or Chrome; ``None`` if there is none."""
    names = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


@dataclass
class Page:
    """A page that has been loaded.

    Attributes:
        browser: its browser.
        session: its session.
        problems: what it has written to the console, thrown, or been refused by its policy.
        requests: the addresses that it has requested, its own first.
    """

    browser: Browser
    session: str
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer of the page to a call of the protocol."""
        return self.browser.call(method, params, self.session)

    def value(self, expression: str) -> Any:
        """The value of a JavaScript expression, a promise included, which JSON can express.

        Raises:
            RuntimeError: the expression has thrown.
        """
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """Click the middle of the first element of a selector, as a mouse does."""
        box = self.value(
            f"(() => {{ const each = document.querySelector({json.dumps(selector)});"
            "each.scrollIntoView({block: 'center'}); const box = each.getBoundingClientRect();"
            "return [box.left + box.width / 2, box.top + box.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def press(self, key: str) -> None:
        """Press a key for the element that has the focus."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def picture(self, path: Path, whole: bool = True) -> None:
        """Write a PNG of the page, or of what its window shows."""
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))

    def note(self, method: str, params: dict[str, Any]) -> None:
        """Keep an event."""
        match method:
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled":
                self.problems.append(" ".join(str(each.get("value", each["type"])) for each in params["args"]))
            case "Log.entryAdded":
                self.problems.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])


class Browser:
    """A running Chromium. :func:`browser` starts and ends it."""

    def __init__(self, process: int, to_it: int, from_it: int) -> None:
        self._process, self._to, self._from = process, to_it, from_it
        self._numbers = itertools.count(1)
        self._rest = b""
        self._pages: dict[str, Page] = {}

    def open(self, path: Path, width: int, height: int = 900, dark: bool = False, script: bool = True) -> Page:
        """Load a file in a new tab and wait until it is complete.

        Args:
            path: the file.
            width: the width of the window in pixels; below 600 it is a phone.
            height: its height.
            dark: whether the reader prefers dark colours.
            script: whether scripts are run.
        """
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        colours = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        page.call("Emulation.setEmulatedMedia", features=colours)
        page.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.wait_for(session, "Page.loadEventFired", "Page.navigate", {"url": path.resolve().as_uri()})
        return page

    def call(self, method: str, params: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        """The result of a call of the protocol.

        Raises:
            RuntimeError: the browser refuses it.
            TimeoutError: there is no answer.
        """
        number = self._send(method, params, session)
        while True:
            message = self._next(method)
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result

    def wait_for(self, session: str, event: str, method: str, params: dict[str, Any]) -> None:
        """Make a call, and wait for an event of the session."""
        self._send(method, params, session)
        while (message := self._next(event)).get("method") != event or message.get("sessionId") != session:
            pass

    def close(self) -> None:
        """End the browser and all its processes."""
        with contextlib.suppress(OSError):
            os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._to)
        os.close(self._from)

    def _send(self, method: str, params: dict[str, Any], session: str | None) -> int:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        return number

    def _next(self, wanted: str) -> dict[str, Any]:
        """The next message; events of pages are kept."""
        end_s = time.monotonic() + LIMIT_S
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], max(end_s - time.monotonic(), 0.0))[0]:
                raise TimeoutError(f"Chromium has not answered for {LIMIT_S:g} s; wanted {wanted}")
            if not (data := os.read(self._from, 1 << 20)):
                raise RuntimeError(f"Chromium has ended; wanted {wanted}")
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if (page := self._pages.get(message.get("sessionId", ""))) is not None and "method" in message:
            page.note(message["method"], message["params"])
        return message


@contextlib.contextmanager
def browser(path: str) -> Iterator[Browser]:
    """A Chromium with an empty profile, in a process group that ends with the block.

    Args:
        path: what :func:`chromium` has returned.
    """
    (read_there, write_here), (read_here, write_there) = os.pipe(), os.pipe()
    # its ends become the descriptors 3 and 4 there; copies from 10 up are not in their way
    ends = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in (read_there, write_there)]
    nowhere = os.open(os.devnull, os.O_RDWR)
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as profile:
        actions = [(os.POSIX_SPAWN_DUP2, each, number) for number, each in enumerate(ends, start=3)]
        actions += [(os.POSIX_SPAWN_DUP2, nowhere, number) for number in range(3)]
        arguments = [path, *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        process = os.posix_spawn(path, arguments, os.environ | {"HOME": profile}, file_actions=actions, setsid=True)
        for each in (read_there, write_there, *ends, nowhere):
            os.close(each)
        running = Browser(process, write_here, read_here)
        try:
            yield running
        finally:
            running.close()
