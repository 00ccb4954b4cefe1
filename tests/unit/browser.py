"""A headless Chromium, driven by its DevTools protocol: as much of it as the tests of the timeline page need.

The protocol is JSON over two pipes (`--remote-debugging-pipe`): no port, no driver, no package. Everything is
synchronous. What a page writes to its console, and exceptions that nothing caught, are kept in `complaints`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
ANSWER_SECONDS = 60.0

KEYS = {
    "Escape": (27, "Escape", ""),
    "Enter": (13, "Enter", "\r"),
    "Tab": (9, "Tab", ""),
    "ArrowLeft": (37, "ArrowLeft", ""),
    "ArrowUp": (38, "ArrowUp", ""),
    "ArrowRight": (39, "ArrowRight", ""),
    "ArrowDown": (40, "ArrowDown", ""),
}
"""Code, name and text of keys that are not letters."""


class BrowserError(Exception):
    """The browser refused, or something in the page raised."""


def find_browser() -> str | None:
    """Path of a Chromium, if there is one."""
    return next((path for path in map(shutil.which, NAMES) if path is not None), None)


class Browser:
    """One page in a browser of its own, as a context manager. `directory` takes its profile."""

    def __init__(self, path: str, directory: Path) -> None:
        self.complaints: list[str] = []
        self._events: list[dict[str, Any]] = []
        self._number = 0
        self._session: str | None = None
        from_us, self._to_browser = os.pipe()
        self._from_browser, to_us = os.pipe()
        command = [
            "bash",  # sh may know descriptors of one digit only
            "-c",
            f'exec "$0" "$@" 3<&{from_us} 4>&{to_us}',  # the two descriptors that the protocol names
            path,
            "--headless",
            "--no-sandbox",  # tests run as root, in containers too
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
            f"--user-data-dir={directory}",
            "about:blank",
        ]
        self._process = subprocess.Popen(
            command,
            pass_fds=(from_us, to_us),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(from_us)
        os.close(to_us)
        self._unread = b""

    def __enter__(self) -> Browser:
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._session = None
        try:
            if self._process.poll() is None:
                self._send("Browser.close", {})
            self._process.wait(10)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        finally:
            os.close(self._to_browser)
            os.close(self._from_browser)

    # --- pages ------------------------------------------------------------------------------------------------------

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Of the window, in pixels; and what the operating system would say of light and dark."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = "dark" if dark else "light"
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str, *, ready: str = "document.body.classList.contains('ready')") -> None:
        """Load a page, and wait until an expression in it is true."""
        self._call("Page.navigate", url="about:blank")
        self._call("Page.navigate", url=url)
        self.wait_for(f"location.href !== 'about:blank' && document.body !== null && {ready}")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise BrowserError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 30.0) -> None:
        """Until it is true. Raises BrowserError."""
        end = time.monotonic() + seconds
        while not self.evaluate(f"Boolean({expression})"):
            if time.monotonic() > end:
                raise BrowserError(f"not so within {seconds} s: {expression}; the page says {self.complaints}")
            time.sleep(0.02)

    def frame(self) -> None:
        """Until the page has drawn what is due."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def allow(self, *permissions: str) -> None:
        """What a reader would be asked for, such as `clipboardReadWrite`, in the words of the protocol."""
        self._call("Browser.grantPermissions", permissions=list(permissions))

    # --- pointer and keys -------------------------------------------------------------------------------------------

    def move(self, x: float, y: float, *, buttons: int = 0) -> None:
        self._call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y, buttons=buttons)

    def click(self, x: float, y: float, *, times: int = 1) -> None:
        self.move(x, y)
        for count in range(1, times + 1):
            for kind in ("mousePressed", "mouseReleased"):
                self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", buttons=1, clickCount=count)
        self.frame()

    def drag(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.move(x, y)
        self._call("Input.dispatchMouseEvent", type="mousePressed", x=x, y=y, button="left", buttons=1, clickCount=1)
        for part in (0.25, 0.5, 0.75, 1.0):
            self.move(x + (to_x - x) * part, y + (to_y - y) * part, buttons=1)
        self._call("Input.dispatchMouseEvent", type="mouseReleased", x=to_x, y=to_y, button="left", clickCount=1)
        self.frame()

    def wheel(self, x: float, y: float, delta: float, *, ctrl: bool = False) -> None:
        modifiers = 2 if ctrl else 0
        self._call("Input.dispatchMouseEvent", type="mouseWheel", x=x, y=y, deltaX=0, deltaY=delta, modifiers=modifiers)
        self.frame()

    def click_on(self, selector: str) -> None:
        """The middle of the first element that matches."""
        x, y = self.evaluate(
            f"(() => {{ const found = document.querySelector({json.dumps(selector)});"
            " found.scrollIntoView({block: 'nearest'}); const box = found.getBoundingClientRect();"
            " return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        self.click(x, y)

    def press(self, key: str, *, shift: bool = False) -> None:
        code, name, text = KEYS[key] if key in KEYS else (ord(key.upper()) if key.isalnum() else 0, "", key)
        event: dict[str, Any] = {"key": name or key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        self._call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **event)
        self._call("Input.dispatchKeyEvent", type="keyUp", **event)
        self.frame()

    def type(self, text: str) -> None:
        for each in text:
            self.press(each)

    # --- the protocol -----------------------------------------------------------------------------------------------

    def _call(self, method: str, /, **parameters: Any) -> dict[str, Any]:
        number = self._send(method, parameters)
        while True:
            message = self._receive()
            if message.get("id") == number:
                if "error" in message:
                    raise BrowserError(f"{method}: {message['error']['message']}")
                result: dict[str, Any] = message["result"]
                return result
            self._note(message)

    def _send(self, method: str, parameters: Mapping[str, Any]) -> int:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to_browser, data) :]
        return self._number

    def _receive(self) -> dict[str, Any]:
        end = time.monotonic() + ANSWER_SECONDS
        while b"\0" not in self._unread:
            if time.monotonic() > end:
                raise BrowserError("the browser does not answer")
            read = os.read(self._from_browser, 1 << 20)
            if not read:
                raise BrowserError(f"the browser has ended with status {self._process.wait(10)}")
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def _note(self, message: Mapping[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                details = parameters["exceptionDetails"]
                self.complaints.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if parameters["type"] in ("error", "warning", "assert"):
                self.complaints.append(" ".join(str(each.get("value", each)) for each in parameters["args"]))
            case "Log.entryAdded" if parameters["entry"]["level"] in ("error", "warning"):
                self.complaints.append(parameters["entry"]["text"])
            case _:
                pass
