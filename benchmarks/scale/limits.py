"""The first thing that breaks where memory is scarce: commits in cgroups that leave less and less of it."""

from __future__ import annotations

import json
import shlex
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.rows import Fact
from benchmarks.scale import PAGE
from benchmarks.scale.one_state import LIMIT
from benchmarks.states import Setting, Shape
from hvdrecover.drill.run import Job

_SHAPES = {"full": Shape(20, 1290), "small": Shape(20, 645)}  # 0.4 and 0.1 GB
_STATES = (0.5, 1.5, 2.5)  # of memory beside that of the training itself
_CGROUPS = Path("/sys/fs/cgroup/memory")  # of version 1; of version 2, a manager gives parts
_PATIENCE, _ROUNDS = 300.0, 5


def measure(setting: Setting) -> list[Fact]:
    """The outcome of commits under each limit."""
    shape, found = _SHAPES[setting.size], []
    for states in _STATES:
        what = f"commits of {shape.nbytes / 1e9:.1f} GB in a cgroup with room for {states:g} states more"
        try:
            with _cgroup() as cgroup:
                found.append(Fact(what, _outcome(shape, states, cgroup, setting.folder / str(states)), PAGE))
        except OSError as error:
            found.append(Fact(f"not measured: {what}", str(error), PAGE))
    return found


def _outcome(shape: Shape, states: float, cgroup: Path, folder: Path) -> str:
    folder.mkdir()
    (folder / LIMIT).write_text(json.dumps([str(cgroup), int(states * shape.nbytes)]))
    words = ["-m", "benchmarks.scale.one_state", "limited", shape.layers, shape.width, _ROUNDS, folder]
    command = shlex.join([sys.executable, *map(str, words)])
    job = Job(["sh", "-c", f"echo $$ > {cgroup}/cgroup.procs; exec {command}"], folder / "log.txt")
    try:
        code = job.wait(_PATIENCE)
    finally:
        job.kill()
    if code == 0:
        seconds = json.loads((folder / "limited.json").read_text())["commit"]
        waited = "commits wait for the write" in (folder / "log.txt").read_text()
        how = "each waits for the write before it" if waited else "each beside the write before it"
        return f"{how}; {statistics.median(seconds):.2f} s each"
    return f"exit code {code}: {(folder / 'log.txt').read_text().strip().splitlines()[-1]}"


@contextmanager
def _cgroup() -> Iterator[Path]:
    """Within this, there is a cgroup."""
    path = _CGROUPS / f"hvdrecover-benchmark-{time.monotonic_ns()}"
    path.mkdir()
    try:
        yield path
    finally:
        for _ in range(100):
            with suppress(OSError):
                path.rmdir()
                break
            time.sleep(0.1)  # processes of it may be ending still
