"""TensorBoard, and what a browser shows of it.

::

    python -m tests.integration.tensorboard_page LOGS PICTURE.png
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.jobs import Job

CHROMIUM = shutil.which("chromium")
PATIENCE = 120.0  # seconds
TAGS = [
    *("loss", "norm/averaged_gradient", "straggler/share"),
    *("seconds/step", "seconds/allreduce_wait"),
]


@contextmanager
def tensorboard(logs: Path, folder: Path) -> Iterator[str]:
    """Serve logs on the loopback interface; the address, once all of `TAGS` are there of all runs."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logs)]
    server = Job([*command, "--host", "127.0.0.1", "--port", "0"], folder / "tensorboard.log")
    try:
        deadline = time.monotonic() + PATIENCE
        runs = {each.name for each in logs.glob("rank-*")}
        while not (address := _address(server)) or not _has(address, runs):
            assert server.running and time.monotonic() < deadline, server.tail()
            time.sleep(0.1)
        yield address
    finally:
        server.kill()


def page(address: str, tags: Sequence[str]) -> str:
    """Return where some scalars are pinned, without smoothing."""
    pins = json.dumps([{"plugin": "scalars", "tag": tag} for tag in tags])
    return f"{address}?{urllib.parse.urlencode({'pinnedCards': pins, 'smoothing': 0})}#timeseries"


def screenshot(url: str, picture: Path, folder: Path) -> str:
    """Have headless Chromium take a picture; the document that it shows."""
    _chromium(folder, f"--screenshot={picture}", url)
    return _chromium(folder, "--dump-dom", url)


def _chromium(folder: Path, *arguments: str) -> str:
    assert CHROMIUM is not None
    log = folder / f"chromium-{time.monotonic_ns()}.log"
    # Without WebGL, TensorBoard draws lines as SVG, which is there when the time, which is not real, is over.
    options = ["--headless=new", "--disable-3d-apis", "--hide-scrollbars", "--virtual-time-budget=20000"]
    options += ["--window-size=1700,1040", "--force-device-scale-factor=0.8"]
    options += ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as profile:
        browser = Job([CHROMIUM, *options, f"--user-data-dir={profile}", *arguments], log)
        try:
            assert browser.wait(PATIENCE) == 0, browser.tail()
        finally:
            browser.kill()
    return log.read_text(errors="replace")


def _address(server: Job) -> str:
    found = re.search(r"http://127\.0\.0\.1:\d+/", server.log.read_text(errors="replace"))
    return found.group() if found else ""


def _has(address: str, runs: set[str]) -> bool:
    with urllib.request.urlopen(f"{address}data/plugin/timeseries/tags", timeout=PATIENCE) as answer:
        of_runs = json.load(answer)["scalars"]["runTagInfo"]
    return all(set(TAGS) <= set(of_runs.get(run, [])) for run in runs)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, tensorboard(Path(sys.argv[1]), Path(folder)) as address:
        screenshot(page(address, TAGS), Path(sys.argv[2]).absolute(), Path(folder))


if __name__ == "__main__":
    main()
