"""A headless Chromium for tests of pages: it is spoken to over two pipes, so that nothing needs to be installed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
WHY_NOT = "no Chromium on this machine (Debian: apt-get install chromium)"
# The script of a report has unpacked the cases when it shows the filter; the answer is how long that took, in ms.
READY = """new Promise(done => {
    const look = () => document.getElementById('filter').hidden ? setTimeout(look, 5) : done(performance.now());
    look();
})"""
_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars")


class Page:
    """A page in the browser. Errors that it logs, such as what its policy refused, are kept in `errors`."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self._loaded = False
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Carry out a command of the DevTools protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._answer()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found

    def _answer(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            read = os.read(self._answers, 2**16)
            assert read, "the browser has ended"
            self._rest += read
        message, self._rest = self._rest.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(message)
        method, parameters = answer.get("method"), answer.get("params", {})
        if method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(parameters["exceptionDetails"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Page.loadEventFired":
            self._loaded = True
        return answer

    def open(self, file: Path) -> None:
        """Open a file and wait until it is loaded and drawn."""
        self._loaded = False
        self.call("Page.navigate", url=file.resolve().as_uri())
        while not self._loaded:
            self._answer()
        self.ask("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def ask(self, expression: str) -> Any:
        """Return what a JavaScript expression comes to, a promise awaited."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def pdf(self, file: Path) -> int:
        """Print to A4 with the margins of the page and return the number of pages."""
        printed = self.call("Page.printToPDF", preferCSSPageSize=True, printBackground=False)
        content = base64.b64decode(printed["data"])
        file.write_bytes(content)
        return content.count(b"/Type /Page\n") + content.count(b"/Type /Page ") + content.count(b"/Type /Page/")


@contextlib.contextmanager
def started() -> Iterator[Page]:
    """A page of a browser that ends with the block."""
    assert PROGRAM
    read_commands, commands = os.pipe()
    answers, write_answers = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads from descriptor 3 and writes to 4.
        words = [PROGRAM, *_OPTIONS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        script = f'exec 3<&{read_commands} 4>&{write_answers}; exec "$@"'
        with subprocess.Popen(
            ["bash", "-c", script, "bash", *words],
            pass_fds=(read_commands, write_answers),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            os.close(read_commands)
            os.close(write_answers)
            page = Page(commands, answers)
            try:
                yield page
            finally:
                process.terminate()
                process.wait(30)
                os.close(commands)
                os.close(answers)
