"""Chromium, driven through its debugging pipe: a tab that loads pages and says what they did.

The protocol (chromedevtools.github.io/devtools-protocol) goes over two pipes as JSON messages that
end with a zero byte: `--remote-debugging-pipe` reads file descriptor 3 and writes 4.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

DEADLINE = 30.0  # seconds of an answer
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage", "--hide-scrollbars", "--remote-debugging-pipe",
)  # fmt: skip


def found() -> str | None:
    """The browser's path; None where there is none."""
    return next((p for n in ("chromium", "chromium-browser") if (p := shutil.which(n))), None)


class Chromium:
    """A browser with one tab and a new profile, until `close`."""

    def __init__(self, path: str, profile: Path) -> None:
        to_read, self._to = os.pipe()
        self._from, to_write = os.pipe()
        command = [path, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        # 3 and 4 may be taken here: the shell puts the pipes there in the browser alone
        places = f"exec 3<&{to_read} 4>&{to_write}; exec " + '"$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", places, "chromium", *command], pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._unread, self._number, self._session = b"", 0, ""
        self.events: list[tuple[str, dict[str, Any]]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """Ends the browser."""
        self._process.terminate()
        self._process.wait(DEADLINE)
        os.close(self._to)
        os.close(self._from)

    def show(self, page: Path, width: int, dark: bool) -> None:
        """Loads a page of a file at a width, light or dark; `events` begins anew."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900,
                  deviceScaleFactor=1, mobile=width < 600)  # fmt: skip
        self.media(dark)
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        self._until("Page.loadEventFired")

    def media(self, dark: bool, medium: str = "") -> None:
        """Light or dark, screen or `print`."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=medium, features=[scheme])

    def ask(self, script: str) -> Any:
        """The value of a JavaScript expression, of a promise its result."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def picture(self, path: Path) -> None:
        """All of the page as a PNG file."""
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol; its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        with open(self._to, "wb", closefd=False) as pipe:
            pipe.write(json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _until(self, event: str) -> None:
        while not any(name == event for name, _ in self.events):
            self._next()

    def _next(self) -> dict[str, Any]:
        """The next message; events are noted."""
        deadline = time.monotonic() + DEADLINE
        while b"\0" not in self._unread:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._from], [], [], max(left, 0))
            data = os.read(self._from, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError(f"chromium did not answer within {DEADLINE:.0f} s, or ended")
            self._unread += data
        text, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if "method" in message:
            self.events.append((message["method"], message["params"]))
        return message
