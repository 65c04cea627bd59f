"""A headless Chromium, driven over its debugging pipe: real pages, without a driver program."""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

COMMAND = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
"""None: there is no Chromium on this machine"""


@final
class Page:
    """One page of the browser."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._rest, self._number = to_browser, from_browser, b"", 0
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.errors: list[str] = []
        """uncaught exceptions and failed requests of the page"""
        self._call("Runtime.enable")
        self._call("Log.enable")

    def open(self, address: str, width: int = 1280, height: int = 900) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self._call("Page.navigate", url=address)

    def prefer(self, scheme: str) -> None:
        """Set the user's colour scheme, light or dark."""
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        reply = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in reply:
            raise AssertionError(json.dumps(reply["exceptionDetails"])[:600])
        return reply["result"].get("value")

    def wait(self, script: str, seconds: float = 30) -> Any:
        """Return the value of an expression when it is true."""
        until = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            if time.monotonic() > until:
                raise AssertionError(
                    f"never true: {script}\n{self.evaluate('document.body?.innerText')}\n{self.errors}"
                )
            time.sleep(0.05)
        return value

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press a key such as Enter; ``modifiers``: 2 is Ctrl."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=modifiers, **text)

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def screenshot(self, file: Path) -> None:
        file.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", captureBeyondViewport=True)["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(json.dumps(answer["params"])[:400])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            data = os.read(self._from, 1 << 16)
            if not data:
                raise AssertionError("Chromium ended")
            self._rest += data
        one, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(one)
        return message


@contextlib.contextmanager
def open_page() -> Iterator[Page]:
    """Start a browser, and end it after the block."""
    assert COMMAND is not None
    (browser_reads, test_writes), (test_reads, browser_writes) = os.pipe(), os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # its other processes end a little later
        flags = [
            "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
            f"--user-data-dir={folder}",
        ]  # fmt: skip
        # a shell gives the pipes the numbers that Chromium expects, 3 to read and 4 to write
        shell = f'exec "$@" 3<&{browser_reads} 4>&{browser_writes}'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", COMMAND, *flags],
            pass_fds=(browser_reads, browser_writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True,
        )  # fmt: skip
        os.close(browser_reads)
        os.close(browser_writes)
        try:
            yield Page(test_writes, test_reads)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(test_writes)
            os.close(test_reads)
