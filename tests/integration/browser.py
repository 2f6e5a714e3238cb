"""A headless Chromium that is told what to do over a pipe, with its DevTools protocol."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
PATIENCE = 60.0  # seconds
PHONE = 375  # CSS pixels
# Chromium reads commands from file descriptor 3 and answers on 4.
_AT_ITS_PLACES = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""

Message = dict[str, Any]
# What sticks out of its box and can't be scrolled to; invisible captions are there for other readers.
CUT = """
Array.from(document.querySelectorAll("body *")).filter((each) => {
    const box = each.getBoundingClientRect(), scrolls = each.closest(".scroll");
    const inside = scrolls && getComputedStyle(scrolls).overflowX == "auto";
    return !inside && each.tagName != "CAPTION" && box.width > 1 && box.right > innerWidth + 1;
}).map((each) => each.outerHTML.slice(0, 200))
"""


class Browser:
    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._read = b""
        self._number = 0
        self._session: str | None = None
        self.events: list[Message] = []
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **parameters: Any) -> Message:
        """Give a command, and wait for what it answers."""
        self._number += 1
        message: Message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.events.append(answer)
        assert "error" not in answer, answer
        result: Message = answer["result"]
        return result

    def open(self, page: Path, width: int, height: int = 900, media: str = "") -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width <= PHONE}
        self.do("Emulation.setDeviceMetricsOverride", **metrics)
        self.do("Emulation.setEmulatedMedia", media=media)
        self.events.clear()
        begun = self.do("Page.navigate", url=page.absolute().as_uri())
        assert "errorText" not in begun, begun
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def value(self, expression: str) -> Any:
        result = self.do("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def told(self, *methods: str) -> list[Message]:
        """The parameters of the events of some kinds since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") in methods]

    def printed(self) -> bytes:
        paper = {"paperWidth": 8.27, "paperHeight": 11.69, "preferCSSPageSize": True}
        return base64.b64decode(self.do("Page.printToPDF", **paper)["data"])

    def _next(self) -> Message:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._answers], [], [], max(deadline - time.monotonic(), 0.0))
            assert ready, "the browser does not answer"
            more = os.read(self._answers, 1 << 20)
            assert more, "the browser has ended"
            self._read += more
        line, _, self._read = self._read.partition(b"\0")
        message: Message = json.loads(line)
        return message


@contextmanager
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    theirs, commands = os.pipe()
    answers, told = os.pipe()
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 10) for descriptor in (theirs, told)]
    options = ["--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--hide-scrollbars"]
    options += ["--no-first-run", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _AT_ITS_PLACES,
                *map(str, high),
                CHROMIUM,
                *options,
                f"--user-data-dir={profile}",
            ],
            pass_fds=high,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for descriptor in (theirs, told, *high):
            os.close(descriptor)
        try:
            yield Browser(commands, answers)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(commands)
            os.close(answers)
