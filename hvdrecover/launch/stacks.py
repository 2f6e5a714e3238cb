"""Where a training process is: its stacks, and the ranks that its collectives wait for."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdrecover.bounded import Bounded
from hvdrecover.config import STACKS_SIGNAL, Config
from hvdrecover.heartbeat import Phase, Reading
from hvdrecover.launch import waits
from hvdrecover.launch.reports import Reports
from hvdrecover.launch.training import Training
from hvdrecover.libraries import is_library

logger = logging.getLogger(__name__)

_LISTED = 3  # tensors
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_PY_SPY_FRAME = re.compile(r"^    (?P<function>\S+) \((?P<file>.+):(?P<line>\d+)\)$", re.MULTILINE)
_THREADS = re.compile(r"^(?=(?:Current thread|Thread) )", re.MULTILINE)
_MAIN = re.compile(r'Current thread|Thread .*"MainThread"')


@dataclass
class Stall:
    """A rank's report of a stall, and what is learnt of the ranks that are waited for.

    Attributes:
        missing: the tensors that wait for each rank.
        seconds: how long there has been no progress.
        places: where these ranks are, in words; None of one that has said to be at something long.
    """

    missing: Mapping[int, Sequence[str]]
    seconds: float
    places: dict[int, str | None] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Return whether all ranks have answered."""
        return self.places.keys() >= self.missing.keys()

    def message(self) -> str:
        """The message; empty if all that are waited for have said to be at something long."""
        return "; ".join(
            f"{_listed(names)} waited {self.seconds:.0f} s for {self.places.get(rank) or f'rank {rank}'}"
            for rank, names in sorted(self.missing.items())
            if self.places.get(rank, "") is not None
        )


def _listed(names: Sequence[str]) -> str:
    shown, hidden = ", ".join(names[:_LISTED]), len(names) - _LISTED
    if hidden > 0:
        return f"{shown} and {hidden} more have"
    return f"{shown} {'has' if len(names) == 1 else 'have'}"


def take(process: int, written: int) -> str:
    """Have a process write down where its threads are; py-spy does, if it is installed and the process can't.

    Args:
        process: the process; it must have imported an adapter.
        written: file descriptor of the memory that it writes to.
    """
    before = os.fstat(written).st_size
    os.kill(process, STACKS_SIGNAL)
    deadline = time.monotonic() + waits.STACKS
    size = before
    while time.monotonic() < deadline:
        time.sleep(0.02)
        now = os.fstat(written).st_size
        if now > before and now == size:  # it has answered, and has come to an end
            return os.pread(written, now - before, before).decode(errors="replace")
        size = now
    return _by_py_spy(process)


def _by_py_spy(process: int) -> str:
    if (program := shutil.which("py-spy")) is None:
        return ""
    command = [program, "dump", "--full-filenames", "--nonblocking", "--pid", str(process)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=waits.PY_SPY, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout


def summary(stacks: str) -> str:
    """The frame that tells most: the innermost of the user's own in the main thread, as ``file:line in f``.

    Args:
        stacks: what `take` gave.

    Returns:
        The frame, or an empty string if there is none.
    """
    main = next((each for each in _THREADS.split(stacks) if _MAIN.match(each)), stacks)
    frames = list(_FRAME.finditer(main)) or list(_PY_SPY_FRAME.finditer(main))
    own = [frame for frame in frames if not _is_library(frame["file"])]
    if not frames:
        return ""
    frame = (own or frames)[0]
    return f"{frame['file']}:{frame['line']} in {frame['function']}"


def _is_library(file: str) -> bool:
    return is_library(file) or is_library(os.path.realpath(file))


class Whereabouts:
    """A guardian's reports of where its training process is.

    Args:
        config: this process's settings.
        reports: of this guardian.
    """

    def __init__(self, config: Config, reports: Reports) -> None:
        self._config = config
        self._reports = reports
        self._disk = Bounded(waits.DISK)
        self._stall: tuple[int, int, list[int]] | None = None

    def report_stall(self, training: Training, reading: Reading) -> None:
        """Hand on, once for each commit, that Horovod says which tensors wait for which ranks."""
        missing = training.stalled()
        stall = (reading.generation, reading.commit, sorted(missing))
        if not missing or stall == self._stall:
            return
        self._stall = stall
        if self._reports.has_supervisor:  # which asks where these ranks are
            self._reports.send(kind="stalled", missing=missing, seconds=reading.silent)
        else:
            message = Stall(missing, reading.silent).message()
            self._reports.report("stalled", message, reading.rank, seconds=reading.silent, missing=missing)

    def report(self, training: Training, ranks: Sequence[int]) -> None:
        """Report to the supervisor where the training process is, if it is one of these ranks."""
        reading = training.read()
        if reading.rank not in ranks:
            return
        place = None
        if not reading.paused:
            text = take(training.pid, training.stacks)
            if text:
                self._save(text, training)
            at = summary(text)
            place = f"{self._reports.name(reading)}, which {f'is at {at}' if at else 'does not answer'}"
        self._reports.send(kind="where", rank=reading.rank, place=place)

    def show(self, training: Training) -> None:
        """Show where the training process is, to somebody who asks."""
        reading = training.read()
        if not self.take(training, reading):
            reason = "it is stopped, or has not imported hvdrecover yet"
            logger.warning("%s does not say where it is: %s", self._reports.name(reading), reason)

    def take(self, training: Training, reading: Reading) -> str:
        """Save the stacks of the training process.

        Returns:
            Where it is, in a few words; an empty string if it does not say.
        """
        if reading.phase == Phase.UNKNOWN:
            return ""
        text = take(training.pid, training.stacks)
        where = summary(text)
        if text:
            message = f"{self._reports.name(reading)} is at {where}"
            self._reports.report(
                "stacks", message, reading.rank, summary=where, file=self._save(text, training)
            )
        return f"at {where}" if where else ""

    def _save(self, text: str, training: Training) -> str | None:
        if self._config.events is None:
            sys.stderr.write(text)
            return None
        file = self._config.events / f"stacks-{self._config.host}-{training.pid}.txt"
        try:
            self._disk(_append, file, text)
        except OSError as error:
            logger.warning("stacks: %s", error)
            return None
        return os.fspath(file)


def _append(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as output:
        output.write(text)
