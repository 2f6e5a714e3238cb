"""Those that do what hvdrecover does: one small job under each, and the same faults."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.jobs.faults import Faults
from benchmarks.jobs.launchers import STANDBY, Launcher, peers
from benchmarks.jobs.near_roots import tidied
from benchmarks.jobs.peers import environment
from benchmarks.jobs.peers.loop import SHAPE, STEP_SECONDS
from benchmarks.jobs.running import Running
from benchmarks.rows import Fact, Goal, Row
from benchmarks.states import Setting
from hvdrecover.errors import HvdrecoverError
from hvdrecover.events import read

_DLROVERS = Path("/dev/shm/standalone_*_ckpt_shm_")
_FAULTS = {"full": 3, "small": 1}  # of each kind
_BETTER = Goal(1.0, 1.0)
_STATE = f"{SHAPE.title}, a step of {1e3 * STEP_SECONDS:.0f} ms"


@dataclass
class _Found:
    """The cost of faults, and of being prepared."""

    faults: Faults = field(default_factory=Faults)  # in seconds and steps
    stalls: list[float] = field(default_factory=list)  # of saves on rank 0, in milliseconds
    copies: list[float] = field(default_factory=list)  # of our commits on rank 0, the same
    ended: str = ""  # the reason for which the job ended when all of its processes were killed


def measure(setting: Setting) -> list[Row | Fact]:
    """The same faults under each, one job after the other; why a peer can't run is a fact."""
    facts: list[Row | Fact] = []
    python: str | None = None
    if setting.size == "full":
        try:
            python = environment.python()
        except (OSError, subprocess.SubprocessError) as error:
            what = "peers that are packages of their own are not measured"
            facts.append(Fact(what, f"they can't be installed: {error}"))
    ours = _strike(STANDBY, setting)
    rows: list[Row | Fact] = [_lost(ours)]
    for peer in peers(python):
        try:
            rows += _rows(ours, peer.title, _strike(peer, setting))
        except HvdrecoverError as error:
            facts.append(Fact(f"{peer.title} is not measured", str(error).splitlines()[0]))
    return [*rows, *facts]


def _rows(ours: _Found, title: str, theirs: _Found) -> list[Row | Fact]:
    def row(what: str, unit: str, mine: list[float], others: list[float], goal: Goal | None) -> Row:
        return Row("peers", what, _STATE, unit, mine, title, others, goal)

    mine, others, until = ours.faults, theirs.faults, "to the next step of all"
    found: list[Row | Fact] = [row(f"SIGKILL of one worker {until}", "s", mine.one, others.one, _BETTER)]
    found.append(row("the same, the longest time without a step", "s", mine.pauses, others.pauses, None))
    if theirs.ended:
        found.append(Fact(f"SIGKILL of all under {title}", theirs.ended))
    else:
        found.append(row(f"SIGKILL of all {until}", "s", mine.all, others.all, _BETTER))
        found.append(_lost(theirs, title))
    if theirs.stalls:
        found.append(row("stall of a commit, of a save", "ms", ours.stalls, theirs.stalls, _BETTER))
        # No peer's save waits for others; a commit ends when all ranks know who leaves, and what has failed.
        found.append(row("the same, the copy alone", "ms", ours.copies, theirs.stalls, None))
    return found


def _lost(found: _Found, title: str = "") -> Row:
    """Each in a row of its own: none is lost perhaps, and that is nothing to divide by."""
    what = "steps lost by SIGKILL of all"
    return Row("peers", f"{what}: {title}" if title else what, _STATE, "steps", found.faults.lost)


def _strike(launcher: Launcher, setting: Setting) -> _Found:
    folder = setting.folder / launcher.way
    found, times = _Found(), _FAULTS[setting.size]
    with tidied(folder / "checkpoint"), _forgotten(), Running(launcher, "peers", folder) as job:
        found.faults.strike_each(job, times)
        try:
            found.faults.strike_all(job, times)
        except HvdrecoverError:
            if launcher is STANDBY or found.faults.all:
                raise
            found.ended = "the job does not train again" if job.running else "the job ends"
        processes = {step.pid for step in job.steps() if step.rank == 0}
        found.stalls += _stalls(folder, processes)
        found.copies += _copies(folder, processes)
    return found


@contextmanager
def _forgotten() -> Iterator[None]:
    """Within this, dlrover's agent and Ray may be killed: what they leave behind is deleted."""
    before = {*_leftovers()}
    try:
        yield
    finally:
        for path in {*_leftovers()} - before:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def _leftovers() -> Iterator[Path]:
    for path in (_DLROVERS, environment.RAY_FOLDERS):
        yield from path.parent.glob(f"{path.name}*")


def _stalls(folder: Path, processes: set[int]) -> list[float]:
    """Milliseconds of saves on rank 0."""
    return [float(line) for process in processes for line in _lines(folder / "steps" / f"{process}.stalls")]


def _copies(folder: Path, processes: set[int]) -> list[float]:
    """Milliseconds of the copies of our commits on rank 0; of others none."""
    commits = (event for event in read(folder / "events") if event.kind == "commit")
    return [1e3 * event.facts["stall"] for event in commits if event.pid in processes]


def _lines(file: Path) -> list[str]:
    """Return the lines that were written in whole."""
    return [line for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
