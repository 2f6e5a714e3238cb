"""The supervisor of a run, as other commands find it: by a file in the run's folder.

A supervisor that was killed leaves its file behind, so whoever reads one looks whether the process lives, and
takes no other process of the same number for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from hvdrecover import process_identity
from hvdrecover.bounded import Bounded
from hvdrecover.errors import LaunchError
from hvdrecover.launch import waits

_PREFIX = "supervisor-"


@dataclass(frozen=True)
class Supervised:
    """A supervisor's word about itself and its job.

    Attributes:
        host: its host's name.
        pid: its process number there.
        process: its `hvdrecover.process_identity.identity`.
        began: when it began, in seconds since the Unix epoch.
        command: the training command.
        processes: with how many processes the job starts.
        least: how many suffice.
        stop_signal: the name of the signal that has the job leave; empty if there is none.
        grace: seconds for the job to leave.
        leaving: whether it has been told to.
    """

    host: str
    pid: int
    process: str
    began: float
    command: tuple[str, ...]
    processes: int
    least: int
    stop_signal: str
    grace: float
    leaving: bool = False

    @property
    def lives(self) -> bool | None:
        """Return whether it runs; None if it is on another host, or in another container."""
        if process_identity.has_ended(self.process):
            return False
        return True if process_identity.identity(self.pid) == self.process != "" else None


class Announcement:
    """The file of this process, the supervisor; gone when it is left.

    Args:
        folder: the run's.
        supervised: what the file says.

    Raises:
        LaunchError: the folder can't be written to.
    """

    def __init__(self, folder: Path, supervised: Supervised) -> None:
        self._path = folder / f"{_PREFIX}{supervised.host}-{supervised.pid}.json"
        self._supervised = supervised
        self._disk = Bounded(waits.DISK)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._write()
        except OSError as error:
            remedy = "the run's events go there, so name another folder: HVDRECOVER_EVENTS=FOLDER"
            raise LaunchError(str(folder), f"can't be written to: {error.strerror}; {remedy}") from error

    def __enter__(self) -> Announcement:
        """Return this."""
        return self

    def __exit__(self, *error: object) -> None:
        """Take the file away."""
        with contextlib.suppress(OSError):
            self._disk(self._path.unlink)

    def leaves(self) -> None:
        """Say that the job leaves."""
        self._supervised = replace(self._supervised, leaving=True)
        with contextlib.suppress(OSError):
            self._disk(self._write)

    def _write(self) -> None:
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(asdict(self._supervised)))
        fresh.replace(self._path)


def find(folder: Path) -> Supervised | None:
    """The supervisor of a run: one that may live, else the last one that left a file; None without a file."""
    found = [each for each in map(_read, folder.glob(f"{_PREFIX}*.json")) if each is not None]
    return max(found, key=lambda each: (each.lives is not False, each.began), default=None)


def ask_to_leave(supervised: Supervised) -> Leaving:
    """Have a supervisor's job leave at a durable commit, unless it is about to.

    Raises:
        LaunchError: it has ended, or is not to be reached from here, or heeds no signal.
    """
    name = f"the supervisor, process {supervised.pid} on {supervised.host}"
    try:
        descriptor = os.pidfd_open(supervised.pid)
    except OSError:
        descriptor = None
    # Looked at once there is a descriptor, so that means the same process.
    if supervised.lives is not True or descriptor is None:
        if descriptor is not None:
            os.close(descriptor)
        gone = "has ended; nothing of its job is left to stop"
        there = f"is not of this host or container; send it {supervised.stop_signal or 'a signal'} there"
        raise LaunchError(name, gone if supervised.lives is False else there)
    try:
        if not supervised.stop_signal:
            raise LaunchError(name, "heeds no signal; HVDRECOVER_STOP_SIGNALS named none as it was started")
        if not supervised.leaving:
            signal.pidfd_send_signal(descriptor, signal.Signals[supervised.stop_signal])
    except (LaunchError, ProcessLookupError, PermissionError) as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise LaunchError(name, f"can't be sent a signal: {error.strerror}") from error
        raise
    return Leaving(descriptor)


class Leaving:
    """The end of a supervisor, to be waited for.

    Args:
        descriptor: of the process.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def wait(self, seconds: float) -> bool:
        """Wait for it; whether it has ended."""
        try:
            poll = select.poll()
            poll.register(self._descriptor, select.POLLIN)
            return bool(poll.poll(seconds * 1000))
        finally:
            os.close(self._descriptor)


def _read(path: Path) -> Supervised | None:
    try:
        facts = json.loads(path.read_text())
        known = {field.name: facts[field.name] for field in fields(Supervised)}
        return Supervised(**{**known, "command": tuple(map(str, known["command"]))})
    except (OSError, ValueError, TypeError, KeyError):
        return None
