"""A page in headless Chromium, operated as a person would: by the DevTools protocol, through two pipes."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


class Browser:
    """One tab. What the page writes to its console, and each address that it asks for, is kept."""

    def __init__(self, process: subprocess.Popen[bytes], write: int, read: int) -> None:
        self.process = process
        self.write, self.read = os.fdopen(write, "wb"), os.fdopen(read, "rb")
        self.number, self.session, self.rest = 0, None, b""
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends a command and returns its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        message |= {"sessionId": self.session} if self.session else {}
        self.write.write(json.dumps(message).encode() + b"\0")
        self.write.flush()
        while (answer := self._next()).get("id") != self.number:
            self._note(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def open(self, address: str, width: int = 1280, height: int = 900, scheme: str = "light") -> None:
        """Opens a page, and waits until it is drawn."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **metrics)
        self.call(
            "Page.navigate", url="about:blank"
        )  # the same address but for what follows "#" would not be read anew
        self.call("Page.navigate", url=address)
        self.drawn(0)

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript gives; a promise is awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def drawn(self, more_than: int) -> int:
        """Waits for a drawing after so many, and returns their number."""
        return self.value(
            "new Promise((done) => { const look = () => { const n = Number(document.body?.dataset.drawn || 0); "
            f"n > {more_than} ? done(n) : setTimeout(look, 10); }}; look(); }})"
        )

    def after(self, *steps: str) -> None:
        """Runs expressions, and waits for what each draws."""
        for step in steps:
            before = int(self.value("document.body.dataset.drawn"))
            self.value(f"{{ {step}; }}")
            self.drawn(before)

    def choose(self, select: str, value: str) -> None:
        self.after(
            f"const select = document.getElementById({json.dumps(select)}); select.value = {json.dumps(value)}; "
            "select.dispatchEvent(new Event('change'))"
        )

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def wheel(self, x: float, y: float, steps: int) -> None:
        """Zooms, into the page with negative steps, and waits for the drawing."""
        for _ in range(abs(steps)):
            before = int(self.value("document.body.dataset.drawn"))
            self.mouse("mouseWheel", x, y, deltaX=0, deltaY=120 if steps > 0 else -120)
            self.drawn(before)

    def picture(self, path: Path, whole: bool = False) -> None:
        """Writes a .png of the window, or of the whole page."""
        image = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(image["data"]))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            more = os.read(self.read.fileno(), 1 << 16)
            assert more, "the browser has ended"
            self.rest += more
        message, _, self.rest = self.rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        match event.get("method"):
            case "Runtime.exceptionThrown":
                details = event["params"]["exceptionDetails"]
                self.errors.append(details.get("exception", details).get("description", str(details)))
            case "Log.entryAdded" if event["params"]["entry"]["level"] == "error":
                self.errors.append(event["params"]["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(event["params"]["request"]["url"])


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; the test is skipped where none is installed."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no Chromium is installed here, as one of {', '.join(NAMES)}")
    to_browser, from_browser = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # It reads commands from file 3 and writes answers to file 4.
        command = f'exec "$0" "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
        options = ["--headless", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        process = subprocess.Popen(
            ["/bin/bash", "-c", command, program, *options, f"--user-data-dir={profile}"],
            pass_fds=(to_browser[0], from_browser[1]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser[0])
        os.close(from_browser[1])
        try:
            yield Browser(process, to_browser[1], from_browser[0])
        finally:
            process.kill()
            process.wait()
