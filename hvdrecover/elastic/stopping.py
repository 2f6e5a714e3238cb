"""Leaving after a preemption: who has been asked to, who leaves, and how a process learns of it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from hvdrecover import heartbeat
from hvdrecover.config import PREEMPTED, Config
from hvdrecover.heartbeat import Stop


class Preempted(SystemExit):
    """This process was asked to leave, and does so at a commit; its exit code is 75 (``EX_TEMPFAIL``)."""

    def __init__(self) -> None:
        super().__init__(PREEMPTED)


@dataclass(frozen=True)
class Decision:
    """Who leaves.

    Attributes:
        leaving: for each rank, whether it leaves.
        whole: whether all do, so that the job is to be started again later.
    """

    leaving: tuple[bool, ...]
    whole: bool

    @property
    def any(self) -> bool:
        """Whether anybody leaves."""
        return any(self.leaving)


def decide(asked: Sequence[int], hosts: Sequence[int], *, elastic: bool) -> Decision:
    """Who leaves, given who has been asked to.

    A host leaves as a whole, as Horovod gives up hosts and not ranks. If no host would be left, or the others
    could not go on without it, all leave.

    Args:
        asked: each rank's `Stop`.
        hosts: each rank's host, as any number.
        elastic: whether the job can go on with fewer ranks.
    """
    emptied = {host for host, stop in zip(hosts, asked, strict=True) if stop != Stop.NO}
    whole = Stop.JOB in asked or (bool(emptied) and (not elastic or emptied == set(hosts)))
    return Decision(tuple(whole or host in emptied for host in hosts), whole)


@contextmanager
def signals(config: Config) -> Iterator[None]:
    """Take the signals of a preemption as a wish to leave at the next commit; a second one ends the process.

    A handler of the user's own is left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in config.stop_signals if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _take_note)
    try:
        yield
    finally:
        for number in ours:
            if signal.getsignal(number) is _take_note:
                signal.signal(number, signal.SIG_DFL)


def _take_note(number: int, frame: FrameType | None) -> None:
    heartbeat.ask_to_stop(Stop.HOST)
    signal.signal(number, signal.SIG_DFL)
