"""A guardian's connection to the supervisor: events and reports go there, and orders come back.

If the connection ends, the supervisor is gone, and the job with it.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdrecover.clock import Bounded, Clock
from hvdrecover.config import STACKS_SIGNAL, Config
from hvdrecover.errors import ConfigError, LaunchError
from hvdrecover.events import Events, number
from hvdrecover.heartbeat import Phase, Reading
from hvdrecover.launch import link, waits
from hvdrecover.launch.training import Training
from hvdrecover.uncaught import is_library

logger = logging.getLogger(__name__)

_MOST_UNSENT = 10_000  # events that wait while the supervisor reads none; beyond it, the oldest are dropped
_LISTED = 3  # tensors that a message lists
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_THREADS = re.compile(r"^(?=(?:Current thread|Thread) )", re.MULTILINE)


class Reports:
    def __init__(self, config: Config, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self.supervisor = _connect(config)
        self._unsent: deque[tuple[float, Mapping[str, Any]]] = deque(maxlen=_MOST_UNSENT)
        self.events = Events(self._take, config.host, clock)
        self._disk = Bounded(waits.DISK)
        self._stall: tuple[int, int, list[int]] | None = None

    def send(self, **facts: Any) -> None:
        self.supervisor.send(**facts)

    def forward(self, training: Training) -> None:
        for event in training.events():
            self._unsent.append((number(event.pop("emitted", None)) or 0.0, event))
        self._send_events()

    def _take(self, event: Mapping[str, Any]) -> None:
        self._unsent.append((self._clock.monotonic(), event))
        self._send_events()

    def _send_events(self) -> None:
        while self._unsent and self.supervisor.is_open and self.supervisor.has_room:
            emitted, event = self._unsent.popleft()
            age = max(self._clock.monotonic() - emitted, 0.0)
            self.send(kind="event", age=age, event=event)

    def name(self, reading: Reading) -> str:
        slot = f"the process of slot {self._config.local_rank}"
        return f"{f'rank {reading.rank}' if reading.rank >= 0 else slot} on {self._config.host}"

    def report(self, kind: str, message: str, rank: int, **facts: Any) -> None:
        """Report by an event and a line on the terminal."""
        self.events.rank = rank
        self.events.emit(kind, message, level=logging.WARNING, **facts)

    # -- the place of the training process ---------------------------------------------------------------

    def report_stall(self, training: Training, reading: Reading) -> None:
        """Report, once per commit, which tensors wait for which ranks. These ranks then show their stacks."""
        missing = training.stalled()
        stall = (reading.generation, reading.commit, sorted(missing))
        # All ranks are in `recover.paused()` together, so the missing ones may be at long work there.
        if missing and stall != self._stall and not (reading.paused or reading.waiting):
            self._stall = stall
            message = stall_in_words(missing, reading.silent)
            self.report("stalled", message, reading.rank, seconds=reading.silent, missing=missing)
            self.send(kind="stalled", ranks=list(missing))

    def show_place(self, training: Training, ranks: list[int] | None = None) -> None:
        """Report the place of the training process, if it is one of these ranks."""
        reading = training.read()
        if (ranks is None or reading.rank in ranks) and not self.take_stacks(training, reading):
            reason = "it has ended, is stopped, or has not imported hvdrecover yet"
            logger.warning("%s does not say where it is: %s", self.name(reading), reason)

    def take_stacks(self, training: Training, reading: Reading) -> str:
        """Save the stacks of the training process; return its place in words, or '' if it does not answer."""
        silent = reading.phase == Phase.UNKNOWN or training.returncode is not None
        text = "" if silent else stacks_of(training.pid, training.stacks)
        where = place_in(text)
        if text:
            message, file = f"{self.name(reading)} is at {where}", self._save(text, training.pid)
            self.report("stacks", message, reading.rank, summary=where, file=file)
        return f"at {where}" if where else ""

    def _save(self, text: str, process: int) -> str | None:
        assert self._config.events is not None  # the supervisor sets it
        file = self._config.events / f"stacks-{self._config.host}-{process}.txt"
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


def _connect(config: Config) -> link.Link:
    if config.supervisor is None:
        raise ConfigError("HVDRECOVER_SUPERVISOR", "is not set; `hvdrecover run` sets it and starts workers")
    host, port, _ = config.supervisor
    supervisor = link.connect(*config.supervisor, name=config.host, slot=config.local_rank)
    if supervisor is None:
        problem = f"does not answer at {host}:{port}; let all hosts of the job connect to each other"
        raise LaunchError("hvdrecover run", problem)
    return supervisor


# -- stacks -------------------------------------------------------------------------------------------


def stall_in_words(missing: Mapping[int, Sequence[str]], seconds: float) -> str:
    parts = []
    for rank, names in sorted(missing.items()):
        shown, hidden = ", ".join(names[:_LISTED]), len(names) - _LISTED
        more = f" and {hidden} more" if hidden > 0 else ""
        have = "has" if len(names) == 1 else "have"
        parts.append(f"{shown}{more} {have} waited {seconds:.0f} s for rank {rank}")
    return "; ".join(parts)


def stacks_of(process: int, written: int) -> str:
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


def place_in(stacks: str) -> str:
    """Return the main thread's innermost frame, the user's own if possible, as ``file:line in f``, or ''."""
    main = next((each for each in _THREADS.split(stacks) if each.startswith("Current thread")), stacks)
    frames = list(_FRAME.finditer(main))
    if not frames:
        return ""
    frame = next((each for each in frames if not is_library(each["file"])), frames[0])
    return f"{frame['file']}:{frame['line']} in {frame['function']}"
