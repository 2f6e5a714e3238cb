"""Find the place of a training process in its code: its stacks, and the ranks that it waits for."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdrecover.clock import Bounded
from hvdrecover.config import STACKS_SIGNAL, Config
from hvdrecover.heartbeat import Phase, Reading
from hvdrecover.launch import waits
from hvdrecover.launch.reports import Reports
from hvdrecover.launch.training import Training
from hvdrecover.uncaught import is_library

logger = logging.getLogger(__name__)

_LISTED = 3  # tensors that a message lists
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_THREADS = re.compile(r"^(?=(?:Current thread|Thread) )", re.MULTILINE)


@dataclass
class Stall:
    """A rank's report of a stall, with the places of the missing ranks."""

    missing: Mapping[int, Sequence[str]]  # tensors that wait for each rank
    seconds: float  # how long there has been no progress
    # in words; None of a rank in ``recover.paused()``
    places: dict[int, str | None] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Return whether all ranks have answered."""
        return self.places.keys() >= self.missing.keys()

    def message(self) -> str:
        """Return the message; empty if all missing ranks are in ``recover.paused()``."""
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
    """Ask a process for its stacks, and return them; '' if it does not answer."""
    before = os.fstat(written).st_size
    os.kill(process, STACKS_SIGNAL)
    deadline = time.monotonic() + waits.STACKS
    size = before
    while time.monotonic() < deadline:
        time.sleep(0.02)
        now = os.fstat(written).st_size
        if now > before and now == size:  # the answer is complete
            return os.pread(written, now - before, before).decode(errors="replace")
        size = now
    return ""


def summary(stacks: str) -> str:
    """Return the main thread's innermost frame, the user's own if possible, as ``file:line in f``, or ''."""
    main = next((each for each in _THREADS.split(stacks) if each.startswith("Current thread")), stacks)
    frames = list(_FRAME.finditer(main))
    own = [frame for frame in frames if not is_library(frame["file"])]
    if not frames:
        return ""
    frame = (own or frames)[0]
    return f"{frame['file']}:{frame['line']} in {frame['function']}"


class Whereabouts:
    """A guardian's reports on the place of its training process."""

    def __init__(self, config: Config, reports: Reports) -> None:
        self._config = config
        self._reports = reports
        self._disk = Bounded(waits.DISK)
        self._stall: tuple[int, int, list[int]] | None = None

    def report_stall(self, training: Training, reading: Reading) -> None:
        """Report, once per commit, which tensors wait for which ranks."""
        missing = training.stalled()
        stall = (reading.generation, reading.commit, sorted(missing))
        if not missing or stall == self._stall:
            return
        self._stall = stall
        if self._reports.has_supervisor:  # the supervisor asks for the places of these ranks
            self._reports.send(kind="stalled", missing=missing, seconds=reading.silent)
        else:
            message = Stall(missing, reading.silent).message()
            self._reports.report("stalled", message, reading.rank, seconds=reading.silent, missing=missing)

    def report(self, training: Training, ranks: Sequence[int]) -> None:
        """Report the place of the training process to the supervisor, if it is one of these ranks."""
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
        """Log the place of the training process, after SIGQUIT."""
        reading = training.read()
        if not self.take(training, reading):
            reason = "it is stopped, or has not imported hvdrecover yet"
            logger.warning("%s does not say where it is: %s", self._reports.name(reading), reason)

    def take(self, training: Training, reading: Reading) -> str:
        """Save the stacks of the training process; return its place in words, or '' if it does not answer."""
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
