"""Commands of hvdrecover, called as a user calls them, also on a terminal; and waiting for their work."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATIENCE = 400.0  # seconds for a command, on a machine that has much else to do
LAUNCHER_VARIABLES = ("HVDRECOVER_", "HOROVOD_", "OMPI_", "PMIX_", "PMI_", "MPI_", "MV2_", "JSM_")
DRILL_PATIENCE = 2400.0  # a recovery takes most of a minute on a machine that is busy

STYLES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def call(
    *words: object, environ: Mapping[str, str] | None = None, patience: float = PATIENCE
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hvdrecover", *map(str, words)],
        env={**os.environ, **(environ or {})},
        capture_output=True,
        text=True,
        timeout=patience,
        check=False,
    )


def call_json(*words: object, environ: Mapping[str, str] | None = None) -> Any:
    """Call a command that must succeed with ``--json``, and return its document."""
    done = call(*words, "--json", environ=environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@dataclass(frozen=True)
class Drilled:
    """A drill that has ended: its exit code, its JSON, its text, and its folder."""

    code: int
    found: dict[str, Any]
    words: str
    folder: Path


def drill(folder: Path, *words: object) -> Drilled:
    done = call("drill", "-np", 2, "--output", folder, *words, patience=DRILL_PATIENCE)
    assert (folder / "verdict.json").exists(), done.stderr
    return Drilled(done.returncode, json.loads((folder / "verdict.json").read_text()), done.stdout, folder)


def on_a_terminal(width: int, *arguments: object, answer: str = "") -> tuple[int, str]:
    """Call a command on a terminal, and type an answer; return its exit code and what it wrote."""
    parent, child = pty.openpty()
    environ = {**os.environ, "COLUMNS": str(width), "TERM": "xterm"}
    command = [sys.executable, "-m", "hvdrecover", *map(str, arguments)]
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environ)
    os.close(child)
    os.write(parent, answer.encode())
    output = b""
    try:
        while piece := os.read(parent, 1 << 16):
            output += piece
    except OSError:  # how Linux says that the other side is closed
        pass
    finally:
        os.close(parent)
    return process.wait(60), output.decode()


def plain_lines(output: str) -> list[str]:
    """Return the lines of what a terminal got, without colours."""
    return STYLES.sub("", output).splitlines()


def answer(code: str, given: str = "") -> str:
    """Return what a fresh process prints that no launcher started."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, input=given, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_until(reached: Callable[[], object], seconds: float = 200) -> None:
    """Wait, however busy the machine is; a look that takes long is repeated less often."""
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if reached():
            return
        looked = time.monotonic()
        assert looked < deadline
        time.sleep(max(0.05, 2 * (looked - began)))
