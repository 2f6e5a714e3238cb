"""Faults of processes: they are killed, stopped, hang, crash or are slow."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from hvdrecover.drill.faults.fault import Drilled, OfOneRank, Plain
from hvdrecover.launch import processes


@dataclass(frozen=True)
class Kill(OfOneRank):
    """SIGKILL to one training process.

    Its standby takes its place, and all resume from the newest commit that one of the others has in memory.
    """

    name: ClassVar[str] = "kill"
    summary: ClassVar[str] = "a training process is killed"

    def strike(self, run: Drilled, rank: int) -> None:
        """Kill the rank's process."""
        processes.kill(run.process_of(rank))


@dataclass(frozen=True)
class KillFirst(Plain):
    """SIGKILL to the training process of rank 0, which writes the commits.

    As `Kill`; a commit that it was writing is left behind incomplete, and is removed.
    """

    name: ClassVar[str] = "kill-rank-0"
    summary: ClassVar[str] = "the training process of rank 0 is killed"

    def whom(self, rank: int, size: int) -> str:
        """Rank 0."""
        return "rank 0"

    def strike(self, run: Drilled, rank: int) -> None:
        """Kill the process of rank 0."""
        processes.kill(run.process_of(0))


@dataclass(frozen=True)
class KillAll(Plain):
    """SIGKILL to all training processes at once.

    No commit is left in memory, so the run resumes from the newest durable one.
    """

    name: ClassVar[str] = "kill-all"
    summary: ClassVar[str] = "all training processes are killed at once"

    def strike(self, run: Drilled, rank: int) -> None:
        """Kill them all."""
        kill_all(run)


@dataclass(frozen=True)
class Stop(OfOneRank):
    """SIGSTOP to one training process, which nobody wakes up.

    It makes no progress, so its guardian kills it when the hang timeout is over; then as `Kill`.
    """

    name: ClassVar[str] = "stop"
    summary: ClassVar[str] = "a training process is stopped for good"

    def strike(self, run: Drilled, rank: int) -> None:
        """Stop the rank's process."""
        _send(run.process_of(rank), signal.SIGSTOP)


@dataclass(frozen=True)
class Loop(OfOneRank):
    """An endless loop in the training script, at a batch; as `Stop`, and the guardian says where it was."""

    name: ClassVar[str] = "loop"
    summary: ClassVar[str] = "a training process runs into an endless loop"

    def strike(self, run: Drilled, rank: int) -> None:
        """Have the rank's process do so."""
        run.order(rank, "loop")


@dataclass(frozen=True)
class Segfault(OfOneRank):
    """A read from address 0 in a training process, at a batch; as `Kill`."""

    name: ClassVar[str] = "segfault"
    summary: ClassVar[str] = "a training process ends by a segmentation fault"

    def strike(self, run: Drilled, rank: int) -> None:
        """Have the rank's process do so."""
        run.order(rank, "segfault")


@dataclass(frozen=True)
class OutOfMemory(OfOneRank):
    """A training process takes memory until it gets no more, at a batch; as `Kill`."""

    name: ClassVar[str] = "out-of-memory"
    summary: ClassVar[str] = "a training process runs out of memory"

    def strike(self, run: Drilled, rank: int) -> None:
        """Have the rank's process do so."""
        run.order(rank, "hunger")


@dataclass(frozen=True)
class Preemption(Plain):
    """SIGTERM to the supervisor, as a scheduler sends it, and a new start when the run has left.

    All ranks leave at their next commit, which is made durable, within the grace period; the exit code is 75,
    no step is repeated, and the next start resumes from that commit.
    """

    name: ClassVar[str] = "preemption"
    summary: ClassVar[str] = "the run is asked to leave by SIGTERM, and started again"

    def strike(self, run: Drilled, rank: int) -> None:
        """Ask the run to leave, and start it again."""
        _send(run.supervisor(), signal.SIGTERM)
        run.start_again()


@dataclass(frozen=True)
class LauncherKilled(Plain):
    """SIGKILL to Horovod's driver, which takes the training processes along.

    The supervisor starts the whole job again, and it resumes from the newest durable commit.
    """

    name: ClassVar[str] = "launcher-killed"
    summary: ClassVar[str] = "horovodrun is killed, and all training processes with it"

    def strike(self, run: Drilled, rank: int) -> None:
        """Kill the driver."""
        processes.kill(run.launcher())


@dataclass(frozen=True)
class SlowRank(OfOneRank):
    """A training process that is stopped for a part of each period, as if it had to share its processor.

    Training continues, at the pace of the slow rank; nothing is killed, and no step is repeated.

    Attributes:
        share: part of the time for which it may run, above 0.
        period: seconds.
    """

    name: ClassVar[str] = "slow-rank"
    summary: ClassVar[str] = "a training process is slowed down"
    lasting: ClassVar[bool] = True

    share: float = 0.25
    period: float = 0.2

    def strike(self, run: Drilled, rank: int) -> None:
        """Slow the rank's process down, until `end`, or until it has ended or this process does."""
        over = run.folder / f"{self.name}-over"
        over.unlink(missing_ok=True)
        # Not by its number: that may be another process's before this is over.
        process = os.pidfd_open(run.process_of(rank))
        pause = threading.Event()

        def slow_down() -> None:
            try:
                with suppress(ProcessLookupError):
                    while not over.exists():
                        signal.pidfd_send_signal(process, signal.SIGSTOP)
                        pause.wait((1 - self.share) * self.period)
                        signal.pidfd_send_signal(process, signal.SIGCONT)
                        pause.wait(self.share * self.period)
            finally:
                os.close(process)

        threading.Thread(target=slow_down, name=self.name, daemon=True).start()

    def end(self, run: Drilled) -> None:
        """Let it run again, within a period."""
        (run.folder / f"{self.name}-over").touch()


def kill_all(run: Drilled) -> None:
    """SIGKILL all training processes."""
    for process in [run.process_of(rank) for rank in run.ranks()]:
        processes.kill(process)


def _send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # it has ended by itself just now
        os.kill(process, number)
