"""A headless Chromium, driven through its DevTools pipe. No test file: tests import it.

Messages of the protocol go through the file descriptors 3 and 4 of the browser, each with a zero byte behind it, so it
needs nothing but the browser: https://chromedevtools.github.io/devtools-protocol/.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

TIMEOUT_S = 60.0
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def find():
    """The program, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page, from `with` to its end.

    Attributes:
      complaints: what the page has written to the console, errors of its script, and failed loads.
    """

    def __enter__(self):
        self.complaints, self._buffer, self._number, self._session = [], b"", 0, None
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        reads, self._write = os.pipe()
        self._read, writes = os.pipe()
        # A shell puts the pipes where the browser looks for them. (sh knows no descriptors of two digits.)
        command = [
            "bash", "-c", f'exec "$0" "$@" 3<&{reads} 4>&{writes}', find(), "--headless=new", "--remote-debugging-pipe",
            "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={self._folder.name}",
        ]  # fmt: skip
        self._process = subprocess.Popen(
            command, pass_fds=(reads, writes), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(reads)
        os.close(writes)
        try:
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        os.close(self._write)  # which ends it
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        self._folder.cleanup()

    def call(self, method, **params):
        """The result of a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(self, path, width, height, dark=False):
        """Loads a file into a window of this size."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        is_phone = width < 500
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + TIMEOUT_S
        while self.run("document.readyState") != "complete":
            if time.monotonic() > deadline:
                raise TimeoutError(f"{path} has not been loaded within {TIMEOUT_S} s")
            time.sleep(0.05)

    def run(self, script):
        """The value of an expression in the page."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def press(self, key):
        """A key, as of a keyboard."""
        text = {"Enter": "\r"}.get(key, "")
        code = {"Enter": 13, "Tab": 9}[key]
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    def screenshot(self, path, whole=False):
        """The window, or the whole page, as a PNG."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _next(self):
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], TIMEOUT_S)
            assert ready, "the browser does not answer"
            part = os.read(self._read, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        event = json.loads(message)
        if event.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(event["params"])
        return event
