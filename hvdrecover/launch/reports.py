"""A guardian's connection to the rest of the job.

With a supervisor: one connection, which carries events and reports to it, and orders back. If the connection
ends, the supervisor is gone. Without a supervisor: the guardian writes events to the record, and watches
Horovod's driver to learn when the job ends.
"""

from __future__ import annotations

import logging
import os
import select
import selectors
import socket
import stat
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from hvdrecover.clock import Bounded, Clock
from hvdrecover.config import Config
from hvdrecover.errors import LaunchError
from hvdrecover.events import Events
from hvdrecover.heartbeat import Reading
from hvdrecover.launch import ends, link, waits
from hvdrecover.launch.signals import Waking
from hvdrecover.launch.training import Training
from hvdrecover.record import Record, number

logger = logging.getLogger(__name__)

_MOST_UNSENT = 10_000  # events that wait while the supervisor reads none
_DRIVER_EVERY = 2.0  # seconds between looks at Horovod's driver
_DRIVER_REFUSALS = 2  # refused connections in a row after which the driver counts as gone

# Facts for the supervisor only, which no event holds.
_UNWRITTEN = frozenset(
    {"traceback", "identity", "final", "end", "point", "again", "heard", "loaded", "root"}
    | {"round", "begun", "age"}
)


class Reports:
    """The reports of one guardian; `events` are the events of its slot."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._supervisor: link.Link | None = None
        self._record = None if config.events is None else Record(config.events, waits.DISK)
        # Events not sent yet, each with its monotonic time. If there are too many, the oldest are dropped.
        self._unsent: deque[tuple[float, Mapping[str, Any]]] = deque(maxlen=_MOST_UNSENT)
        self.events = Events(self._take, config.host, clock)
        self._launcher = LauncherWatch(config.rendezvous, config.collective_seconds, clock)

    def connect(self) -> bool:
        """Connect to the supervisor; return whether there is one that can be reached."""
        if self._config.supervisor is None:
            return False
        facts: dict[str, Any] = {
            "name": self._config.host,
            "slot": self._config.local_rank,
            "pid": os.getpid(),
        }
        self._supervisor = link.connect(*self._config.supervisor, **facts)
        if self._supervisor is None:
            logger.warning("the supervisor can't be reached; watching Horovod's driver instead")
        else:  # the supervisor watches the driver
            self._launcher = LauncherWatch(None, 0.0, self._clock)
        return self.has_supervisor

    def listen(self, selector: selectors.BaseSelector, hear: Callable[[], object]) -> None:
        """Call a function whenever the supervisor, if there is one, has sent something."""
        if self._supervisor is not None:
            selector.register(self._supervisor, selectors.EVENT_READ, hear)

    @property
    def has_supervisor(self) -> bool:
        """Return whether a supervisor was reached at the start."""
        return self._supervisor is not None

    @property
    def is_supervised(self) -> bool:
        """Return whether the supervisor is still connected."""
        return self._supervisor is not None and self._supervisor.is_open

    def lost(self) -> str:
        """Return why the supervisor or the launcher counts as lost; '' if neither does."""
        if self._supervisor is not None and not self._supervisor.is_open:
            return "the supervisor is gone"
        return self._launcher.lost() if self._config.launched else ""

    def receive(self) -> list[dict[str, Any]]:
        """Return the messages from the supervisor that have arrived."""
        return self._supervisor.receive() if self._supervisor is not None else []

    def send(self, **facts: Any) -> None:
        """Send a message to the supervisor, if there is one."""
        if self._supervisor is not None:
            self._supervisor.send(**facts)

    def forward(self, training: Training) -> None:
        """Send the events that a training process has emitted since the last time."""
        for event in training.events():
            self._unsent.append((number(event.pop("emitted", None)) or 0.0, event))
        self._send_events()

    def _take(self, event: Mapping[str, Any]) -> None:
        self._unsent.append((self._clock.monotonic(), event))
        self._send_events()

    def _send_events(self) -> None:
        """Send events to the supervisor while it takes them; without one, append them to the record."""
        while self._unsent:
            if self._supervisor is None or not self._supervisor.is_open:
                _, event = self._unsent.popleft()
                if self._record is not None:
                    self._record.put(event)
            elif self._supervisor.has_room:
                emitted, event = self._unsent[0]
                age = max(self._clock.monotonic() - emitted, 0.0)
                self._supervisor.send(kind="event", age=age, event=event)
                if self._supervisor.is_open:
                    self._unsent.popleft()
            else:
                break
        if self._record is not None:
            self._record.flush()

    def name(self, reading: Reading) -> str:
        """Return the name of a training process in messages."""
        rank = (
            f"rank {reading.rank}" if reading.rank >= 0 else f"the process of slot {self._config.local_rank}"
        )
        return f"{rank} on {self._config.host}"

    def report(
        self, kind: str, message: str, rank: int, *, level: int = logging.WARNING, **facts: Any
    ) -> None:
        """Report by an event, a line on the terminal, and a message to the supervisor."""
        self.events.rank = rank
        self.send(kind=kind, message=message, **facts)
        written = {name: value for name, value in facts.items() if name not in _UNWRITTEN}
        self.events.emit(kind, message, level=level, **written)

    def cannot_start(self, error: LaunchError, waking: Waking, seconds: float) -> None:
        """Report that the command cannot be started, and wait until the supervisor ends the job.

        The supervisor shows the error. Without a training process, only its order to stop matters.
        """
        facts: dict[str, Any] = {"end": ends.FIRST_ERROR.name, "point": (0, 0), "commit": [0, 0]}
        facts |= {"fault": "script_error", "detail": str(error), "exit": 1, "final": True}
        self.report("fault", str(error), -1, level=logging.DEBUG, slot=self._config.local_rank, **facts)
        orders: list[object] = []
        self.listen(waking.selector, lambda: orders.extend(each.get("order") for each in self.receive()))
        deadline = self._clock.monotonic() + seconds
        while "stop" not in orders and self.is_supervised and self._clock.monotonic() < deadline:
            if waking.wait(deadline - self._clock.monotonic()):
                return

    def end(self, how: str, reading: Reading, root: str) -> None:
        """Tell the supervisor how this slot ended: finished, untrained, preempted, left or stopped."""
        commit = [reading.generation, reading.commit]
        self.send(kind="end", how=how, phase=reading.phase, commit=commit, root=root)


class LauncherWatch:
    """Watches for the end of Horovod's driver, on this host or another one."""

    def __init__(self, rendezvous: tuple[str, int] | None, timeout: float, clock: Clock) -> None:
        self._rendezvous = rendezvous
        self._timeout = timeout
        self._clock = clock
        self._answered = self._looked = clock.monotonic()
        self._refusals = 0
        self._connect = Bounded(waits.DRIVER)

    def lost(self) -> str:
        """Return why the launcher counts as lost; '' if it does not."""
        if output_is_closed():
            return "nobody reads its output any more"
        if self._rendezvous is not None and self._clock.monotonic() - self._looked >= _DRIVER_EVERY:
            self._look(self._rendezvous)
        if self._refusals >= _DRIVER_REFUSALS:
            return "Horovod's driver is gone"
        if self._rendezvous is not None and self._clock.monotonic() - self._answered > self._timeout:
            return f"Horovod's driver has not answered for {self._timeout:g} s: this host is cut off"
        return ""

    def _look(self, rendezvous: tuple[str, int]) -> None:
        try:
            self._connect(socket.create_connection, rendezvous, timeout=waits.DRIVER).close()
        except ConnectionRefusedError:
            self._refusals += 1
        except OSError:
            self._refusals = 0
        else:
            self._refusals = 0
            self._answered = self._clock.monotonic()
        self._looked = self._clock.monotonic()
        if self._refusals:
            self._answered = self._looked


def output_is_closed(descriptor: int = 1) -> bool:
    """Return whether this output goes to a process that has closed it."""
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))
