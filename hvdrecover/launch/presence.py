"""The file in a run's folder by which other commands find the supervisor."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from hvdrecover import machine
from hvdrecover.errors import LaunchError

_PREFIX = "supervisor-"
_LOOK = 0.1  # seconds between looks at a supervisor that is to end


@dataclass(frozen=True)
class Supervised:
    host: str  # its host's name
    pid: int  # its process number there
    process: str  # its `hvdrecover.machine.identity`
    began: float  # when it began, in seconds since the Unix epoch
    command: list[str]  # the training command
    processes: int  # number of processes with which the job starts
    least: int  # number of processes that suffices
    stop_signal: str  # the name of the signal that has the job leave; empty if there is none
    grace: float  # seconds for the job to leave
    leaving: bool = False  # whether the job is leaving

    @property
    def lives(self) -> bool | None:
        """Whether the supervisor runs; None if it is on another host, or in another container."""
        # A killed supervisor leaves its file behind, and another process may have got its number.
        if machine.has_ended(self.process):
            return False
        return True if machine.identity(self.pid) == self.process != "" else None


def announce(folder: Path, supervised: Supervised) -> Path:
    """Write the file of a supervisor; return its path."""
    path = folder / f"{_PREFIX}{supervised.host}-{supervised.pid}.json"
    folder.mkdir(parents=True, exist_ok=True)  # no deadline: callers bound it
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(asdict(supervised)))  # no deadline: callers bound it
    fresh.replace(path)  # no deadline: callers bound it
    return path


def find(folder: Path) -> Supervised | None:
    """Return the supervisor of a run: a running one if there is one, else the latest; None without a file."""
    found = [each for each in map(_read, folder.glob(f"{_PREFIX}*.json")) if each is not None]
    return max(found, key=lambda each: (each.lives is not False, each.began), default=None)


def ask_to_leave(supervised: Supervised) -> None:
    """Signal a supervisor to let its job leave, unless it is leaving; raises `LaunchError` if it cannot."""
    name, stop = f"the supervisor, process {supervised.pid} on {supervised.host}", supervised.stop_signal
    lives = supervised.lives
    if lives is False:
        raise LaunchError(name, "has ended; nothing of its job is left to stop")
    if lives is None:
        raise LaunchError(name, f"is not of this host or container; send it {stop or 'a signal'} there")
    if not stop:
        raise LaunchError(name, "heeds no signal; HVDRECOVER_STOP_SIGNALS named none as it was started")
    if not supervised.leaving:
        try:
            os.kill(supervised.pid, signal.Signals[stop])
        except OSError as error:
            raise LaunchError(name, f"can't be sent a signal: {error.strerror}") from error


def wait_for_end(supervised: Supervised, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while supervised.lives and time.monotonic() < deadline:
        time.sleep(_LOOK)
    return not supervised.lives


def _read(path: Path) -> Supervised | None:
    try:
        return Supervised(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):  # removed meanwhile, or of another version
        return None
