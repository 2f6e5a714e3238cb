"""Departures and changes of hosts: how a process learns of them, and which ranks leave."""

from __future__ import annotations

import functools
import signal
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from hvdrecover import heartbeat
from hvdrecover.config import PREEMPTED, Config
from hvdrecover.events import logger
from hvdrecover.heartbeat import Stop
from hvdrecover.state.hooks import Hook, Moment, Table
from hvdrecover.state.horovod import hosts_updated


class Preempted(SystemExit):
    """This process was asked to leave, and does so at a commit; its exit code is 75 (``EX_TEMPFAIL``)."""

    def __init__(self) -> None:
        super().__init__(PREEMPTED)


class Departure(Exception):  # noqa: N818  not an error: the ranks have decided it together
    """Ranks leave at a commit that all have made. If ``whole``, all do, and a later start continues."""

    def __init__(self, leaving: Sequence[bool], *, whole: bool) -> None:
        super().__init__("ranks leave")
        self.leaving = tuple(leaving)
        self.whole = whole


class Leaving(Hook):
    """Which ranks leave, as after a preemption, and which hosts have come or gone.

    If any rank knows of a change of hosts since the last rendezvous, all ranks meet in another one.
    """

    votes_at = ("commit", "check")

    def __init__(self, config: Config) -> None:
        self._elastic = config.elastic
        self._host = zlib.crc32(config.host.encode())
        self.hosts_changed = threading.Event()

    def numbers(self, moment: Moment) -> Sequence[int]:
        return [heartbeat.page.stop, self._host, self.hosts_changed.is_set()]

    def verdict(self, moment: Moment, table: Table) -> BaseException | None:
        asked, hosts, changes = table.T.tolist()
        if any(asked) and (departure := decide(asked, hosts, elastic=self._elastic)) is not None:
            return departure
        return hosts_updated() if self._elastic and any(changes) else None


def decide(asked: Sequence[int], hosts: Sequence[int], *, elastic: bool) -> Departure | None:
    """Decide which ranks leave, if any; from each rank's `Stop` and host.

    A host leaves as a whole, because Horovod gives up hosts, not ranks. All ranks leave if no host would be
    left, if the job is not elastic, or if the supervisor asks the whole job to leave.
    """
    emptied = {host for host, stop in zip(hosts, asked, strict=True) if stop != Stop.NO}
    whole = Stop.JOB in asked or (bool(emptied) and (not elastic or emptied == set(hosts)))
    leaving = [whole or host in emptied for host in hosts]
    return Departure(leaving, whole=whole) if any(leaving) else None


@contextmanager
def signals(numbers: Sequence[int], *, reports: bool = False) -> Iterator[None]:
    """Handle the signals of a preemption: leave at the next commit. A second signal ends the process.

    A handler that the script has set stays. ``reports``: log a warning about it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in numbers if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _take_note)
    if reports:
        # At the first commit, the training function may have set a handler.
        heartbeat.at_commit(functools.partial(_report_others, numbers))
    try:
        yield
    finally:
        for number in ours:
            if signal.getsignal(number) is _take_note:
                signal.signal(number, signal.SIG_DFL)


def _report_others(numbers: Sequence[int]) -> None:
    for number in numbers:
        handler = signal.getsignal(number)
        if not callable(handler) or handler is _take_note:
            continue
        logger.warning(
            "%s goes to the script's own handler (%s), not to hvdrecover's: if only a training process gets "
            "the signal, the job does not leave. Remove that handler, or send the signal to hvdrecover run: "
            "then the job leaves at its next commit, with exit code 75",
            signal.Signals(number).name,
            getattr(handler, "__qualname__", handler),
        )


def _take_note(number: int, frame: FrameType | None) -> None:
    heartbeat.page.ask(Stop.HOST)
    signal.signal(number, signal.SIG_DFL)
