"""Chromium without a window, driven through a pipe."""

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

from support.limits import limited

SECONDS = 60
"""That only a hang exceeds."""
LIFE = 600
"""Seconds after which a browser is ended that a test did not end."""


class Browser:
    """One tab."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes, self._session, self._last, self._rest = reads, writes, "", 0, b""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> Any:
        """The result of a command of the DevTools protocol."""
        self._last += 1
        asked = {"id": self._last, "method": method, "params": params}
        asked |= {"sessionId": self._session} if self._session else {}
        os.write(self._writes, json.dumps(asked).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                read = os.read(self._reads, 1 << 16)
                assert read, "the browser has ended"
                self._rest += read
            line, _, self._rest = self._rest.partition(b"\0")
            told = json.loads(line)
            if told.get("id") == self._last:
                assert "error" not in told, told
                return told["result"]

    def run(self, script: str) -> Any:
        """The value of an expression."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script: str) -> Any:
        """The value of an expression once it is true."""
        end = time.monotonic() + SECONDS
        while not (value := self.run(script)):
            assert time.monotonic() < end, script
            time.sleep(0.02)
        return value

    def picture(self, path: Path, width: int, height: int, dark: bool) -> None:
        """Writes a PNG of the page."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        time.sleep(1.2)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a fresh profile."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert found is not None, "a browser is needed: apt-get install chromium"
    (its_input, ours), (mine, its_output) = os.pipe(), os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    command = f'exec "$0" "$@" 3<&{its_input} 4>&{its_output}'
    process = subprocess.Popen(
        ["bash", "-c", command, found, *flags],
        pass_fds=(its_input, its_output),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(its_input)
    os.close(its_output)
    with limited(process, LIFE), contextlib.ExitStack() as ends:
        ends.callback(process.kill)
        ends.callback(os.close, mine)
        ends.callback(os.close, ours)
        yield Browser(mine, ours)
