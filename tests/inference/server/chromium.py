"""Headless Chromium over its own pipe: open a page, press keys, run JavaScript, take
screenshots."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu",
    "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars", "--disable-extensions",
    "--disable-background-networking", "--force-device-scale-factor=1",
)  # fmt: skip
_WAIT = 60.0  # seconds; a busy machine starts slowly
_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "ArrowRight": (39, ""), "Tab": (9, "")}


def find_chromium() -> str:
    """Return the path of Chromium, or skip the test if it is not installed."""
    for name in _NAMES:
        if path := shutil.which(name):
            return path
    pytest.skip("no Chromium on the PATH: apt-get install chromium")


class Page:
    """One tab, controlled by the developer tools' protocol: JSON, terminated by zero bytes."""

    def __init__(self, write_end: int, read_end: int) -> None:
        self._write, self._read = write_end, read_end
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.requests: list[str] = []  # what the page has requested
        self.problems: list[str] = []  # errors on the page
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self._notice(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            self._buffer += os.read(self._read, 1 << 16)
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _notice(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(str(parameters["exceptionDetails"]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.problems.append(str(parameters["entry"]["text"]))

    def open(self, url: str, *, width: int, height: int, dark: bool = False) -> None:
        """Open a page in a window of this size."""
        mobile = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": mobile}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def ask(self, expression: str) -> Any:
        """Return the value of a JavaScript expression."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait(self, expression: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + _WAIT
        while not self.ask(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.02)

    def write(self, text: str) -> None:
        """Type into the focused element."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, ctrl: bool = False) -> None:
        """Press a key."""
        code, text = _KEYS[key]
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 2 * ctrl}
        told = {"text": text} if text and not ctrl else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **told)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def hover(self, selector: str) -> None:
        """Move the mouse over the middle of an element."""
        box = self.ask(
            f"(r => [r.x + r.width / 2, r.y + r.height / 2])"
            f"(document.querySelector({selector!r}).getClientRects()[0])"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=box[0], y=box[1])

    def picture(self, path: Path) -> None:
        """Return a screenshot as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextlib.contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """Run a browser that keeps its files in `folder`."""
    path = find_chromium()
    their_read, our_write = os.pipe()
    our_read, their_write = os.pipe()
    # The browser reads from descriptor 3 and writes to 4.
    words = [path, *_FLAGS, f"--user-data-dir={folder}", "about:blank"]
    script = f'exec "$@" 3<&{their_read} 4>&{their_write}'
    process = subprocess.Popen(
        ["bash", "-c", script, "chromium", *words],
        pass_fds=(their_read, their_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(their_read)
    os.close(their_write)
    try:
        yield Page(our_write, our_read)
    finally:
        process.terminate()
        process.wait(timeout=60)
        os.close(our_write)
        os.close(our_read)
