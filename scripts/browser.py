"""A Chromium without a window, asked through two pipes: for the picture of the lab, and its tests.

    with Browser() as browser:
        browser.open("http://127.0.0.1:8000/")
        browser.wait("document.title === 'Lab'")
        browser.picture("lab.png")

It needs nothing besides the program itself, which $CHROMIUM may name.
"""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def program() -> str | None:
    """The Chromium of this machine."""
    named = os.environ.get("CHROMIUM")
    return named or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a browser.

    Args:
        width: Of the window, as the height, in pixels of a page.
        scale: Pixels of a picture for each of a page.
    """

    def __init__(self, width: int = 1200, height: int = 900, scale: float = 1.0) -> None:
        found = program()
        if found is None:
            raise FileNotFoundError(f"there is none of {', '.join(NAMES)}: set $CHROMIUM to one")
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs, ours = os.pipe(), os.pipe()
        command = [
            found, "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--disable-background-networking", "--disable-extensions",
            "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}", "about:blank",
        ]  # fmt: skip
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs[0], ours[1])]

        def third_and_fourth() -> None:  # where the browser looks for its pipes
            for end, place in zip(ends, (3, 4), strict=True):
                os.dup2(end, place)

        self._process = subprocess.Popen(
            command,
            pass_fds=(3, 4),
            preexec_fn=third_and_fourth,  # noqa: PLW1509 it takes no lock
            stderr=subprocess.DEVNULL,
        )
        for end in ends:
            os.close(end)
        os.close(theirs[0])
        os.close(ours[1])
        self._write, self._read = theirs[1], ours[0]
        self._rest, self._ids, self.events = b"", itertools.count(1), list[dict[str, Any]]()
        self._session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._target, self._session = target, attached["sessionId"]
        for name in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{name}.enable")
        self.resize(width, height, scale)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._write)
        os.close(self._read)
        self._folder.cleanup()

    def ask(self, method: str, **params: Any) -> Any:
        """The answer to a command of the DevTools protocol."""
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            told = self._next(60)
            if told.get("id") == number:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']['message']}")
                return told["result"]

    def _next(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            if not (more := os.read(self._read, 2**16)):
                raise RuntimeError("the browser has ended")
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\0")
        told: dict[str, Any] = json.loads(line)
        if "method" in told:
            self.events.append(told)
        return told

    # ------------------------------------------------------------------ the page

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        """Give the page another size."""
        form = {"width": width, "height": height, "deviceScaleFactor": scale}
        self.ask("Emulation.setDeviceMetricsOverride", mobile=width < 600, **form)

    def open(self, url: str) -> None:
        """Go to an address."""
        told = self.ask("Page.navigate", url=url)
        if "errorText" in told:
            raise RuntimeError(f"{url}: {told['errorText']}")

    def close(self) -> None:
        """Close the page, as a reader would."""
        self._session = None
        self.ask("Target.closeTarget", targetId=self._target)

    def value(self, expression: str) -> Any:
        """What an expression is in the page."""
        told = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in told:
            details = told["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return told["result"].get("value")

    def wait(self, expression: str, seconds: float = 30.0) -> Any:
        """Wait until an expression holds in the page; its value."""
        return until(lambda: self.value(expression), seconds, expression)

    def key(self, name: str) -> None:
        """Press a key, such as Tab."""
        codes = {"Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "Enter": 13, "Home": 36, "End": 35}
        codes[" "] = 32
        event = {"key": name, "code": name, "windowsVirtualKeyCode": codes[name]}
        text = {"Enter": "\r", " ": " "}.get(name)
        self.ask(
            "Input.dispatchKeyEvent", type="keyDown", **event, **({"text": text} if text else {})
        )
        self.ask("Input.dispatchKeyEvent", type="keyUp", **event)

    def click(self, x: float, y: float) -> None:
        """Click at a place of the window."""
        for kind in ("mousePressed", "mouseReleased"):
            place = {"x": x, "y": y, "button": "left", "clickCount": 1}
            self.ask("Input.dispatchMouseEvent", type=kind, **place)

    def dark(self, dark: bool = True) -> None:
        """Ask for a dark page."""
        value = "dark" if dark else "light"
        features = [{"name": "prefers-color-scheme", "value": value}]
        self.ask("Emulation.setEmulatedMedia", features=features)

    def picture(self, path: str | Path, whole: bool = False) -> None:
        """Write what is seen, or all of the page, to a .png."""
        told = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        Path(path).write_bytes(base64.b64decode(told["data"]))

    def errors(self) -> list[str]:
        """What the page complained of on its console."""
        found = []
        for event in self.events:
            if event["method"] == "Runtime.exceptionThrown":
                details = event["params"]["exceptionDetails"]
                found.append(details.get("exception", {}).get("description", details["text"]))
            elif event["method"] == "Log.entryAdded":
                entry = event["params"]["entry"]
                found += [entry["text"]] if entry["level"] == "error" else []
        return found


def until(holds: Callable[[], Any], seconds: float, what: str) -> Any:
    """Wait until something holds; what it gave."""
    end = time.monotonic() + seconds
    while not (value := holds()):
        if time.monotonic() > end:
            raise TimeoutError(f"after {seconds:g} s this does not hold: {what}")
        time.sleep(0.05)
    return value
