"""The supervisor of a job: starts ``horovodrun``, and starts it again when Horovod gives up.

1. Start ``horovodrun`` (an `Attempt`). It starts a guardian for each slot, here and through ssh. Each
   guardian connects back, and is told the facts of earlier attempts (`restarts.known`).
2. Until ``horovodrun`` ends, hear the guardians: commits, faults, events, ends. A fault that no restart in
   place can mend ends the attempt at once (`restarts.ending`).
3. Then hear last messages, stop the guardians that are left, and kill every process of the job on this host.
   They are known by a mark in their environment.
4. Decide (`restarts.outcome`): the job is over, or starts again after a pause, from its newest durable
   commit.

A stop signal, or Slurm's plan to end the job, makes the job leave (`State.LEAVING`): all ranks make one more
commit and exit, within the grace. Any other signal, or a second one, stops it at once (`State.STOPPED`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from pathlib import Path
from typing import Any

from hvdrecover import machine
from hvdrecover.clock import SYSTEM_CLOCK, Bounded, Clock
from hvdrecover.config import PREEMPTED, Config
from hvdrecover.discovery import selection
from hvdrecover.events import Events
from hvdrecover.launch import ends, horovodrun, processes, restarts, ssh, waits
from hvdrecover.launch.ends import FIRST_ERROR
from hvdrecover.launch.guardians import Guardian, Guardians
from hvdrecover.launch.link import Message
from hvdrecover.launch.missing_hosts import Shortage, Unreachable
from hvdrecover.launch.presence import Announcement, Supervised
from hvdrecover.launch.restarts import Attempt, Outcome
from hvdrecover.launch.signals import Waking
from hvdrecover.launch.slurm import SlurmJob
from hvdrecover.launch.stacks import Stall
from hvdrecover.machine import versions
from hvdrecover.record import Record
from hvdrecover.redaction import redact

logger = logging.getLogger(__name__)

_MARGIN = 5.0  # seconds after the grace before everything is killed
_REQUEUE = 10.0  # seconds beyond these for a controller to take a requeue before it ends the job
_REPORTS = "failing-hosts"  # file of hosts with given-up or diverged slots, which discovery excludes


@dataclass(frozen=True)
class Settings:
    """The user's settings of a supervised job."""

    options: horovodrun.Options  # options of ``horovodrun``
    worker: tuple[str, ...]  # the guardian's command, before the training command
    environ: dict[str, str]  # variables on top of this process's own
    folder: Path  # of the run: events and other files
    max_restarts: int = 10  # how many restarts in a row may bring no progress
    grace: float = 30.0  # seconds for the job to leave after a preemption


class State(Enum):
    """The states of a supervisor; each may only be followed by a later one."""

    TRAINING = auto()
    LEAVING = auto()  # the ranks have been asked to leave at their next commit
    STOPPED = auto()  # everything is killed


class Supervisor:
    """Starts ``horovodrun``, and starts it again when Horovod gives up."""

    def __init__(
        self,
        command: Sequence[str],
        settings: Settings,
        config: Config,
        slurm: SlurmJob | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._command = list(command)
        self._started: dict[str, Any] = {
            "command": list(map(redact, self._command)),
            "machine": machine.describe(),
            "versions": versions(),
        }
        self._settings = settings
        self._config = config
        self._slurm = slurm
        self._clock = clock
        self._record = None if config.events is None else Record(config.events, waits.DISK)
        self._events = Events(None if self._record is None else self._record.add, config.host, clock)
        self._mark = f"{ssh.MARK}={secrets.token_hex(16)}"
        self._attempts: list[Attempt] = []
        self._state, self._code = State.TRAINING, 0  # the exit code of a job that is stopped
        self._signalled = False
        self._unreachable: Unreachable | None = None
        self._stall: Stall | None = None
        self._stall_due = 0.0
        self._kill_at: float | None = None
        self._left_at = 0.0
        self._disk = Bounded(waits.DISK)
        self._job = secrets.token_hex(16)
        self._suspects: list[str] = []
        self._heard_at: float | None = None
        self._streak = restarts.Streak()
        self._begun: dict[str, float] = {}  # by slot, when this start's process is known to have begun

    def run(self) -> int:
        """Keep the job going until its training is finished or given up; return the exit code (`ends`).

        Raises `ConfigError` for an invalid option, `LaunchError` if the run's folder cannot be written to.
        """
        # The caller may have ignored some of them.
        meant = {*self._config.stop_signals, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
        heeded = [number for number in meant if signal.getsignal(number) is not signal.SIG_IGN]
        arguments = horovodrun.arguments(self._settings.options, [*self._settings.worker, *self._command])
        path = ssh.kept_alive(self._config, self._settings.folder)
        if self._config.remote_shell is None:
            self._unreachable = Unreachable(self._settings.options, {**os.environ, "PATH": path}, self._clock)
        processes.allow_open_files()  # one connection per slot, and those of horovodrun
        with (
            Waking((*heeded, signal.SIGCHLD)) as self._waking,
            Announcement(self._settings.folder, self._supervised()) as self._announcement,
        ):
            self._guardians = Guardians(self._waking.selector, self._hear, self._lost, self._greeting)
            if self._slurm is not None:
                self._slurm.watch()
            try:
                outcome = self._keep_going(arguments, path)
            finally:
                self._guardians.close()
                if self._slurm is not None:
                    self._slurm.close()
        self._say_end(outcome)
        if self._slurm is not None and outcome.code == PREEMPTED:
            self._slurm.requeue(committed=any(attempt.committed for attempt in self._attempts))
        return outcome.code

    def _supervised(self) -> Supervised:
        options, signals = self._settings.options, self._config.stop_signals
        return Supervised(
            host=socket.gethostname(),
            pid=os.getpid(),
            process=machine.identity(),
            began=self._clock.now(),
            command=tuple(map(redact, self._command)),
            processes=options.processes,
            least=options.least or options.processes,
            stop_signal=signals[0].name if signals else "",
            grace=self._settings.grace,
        )

    def _keep_going(self, arguments: Sequence[str], path: str) -> Outcome:
        outcome = Outcome("restart", 1, "")
        while outcome.action == "restart":
            self._pause(outcome.pause)
            if self._state is not State.STOPPED:
                self._attempt(arguments, path)
            if self._state is State.STOPPED:
                return Outcome("end", self._code, "stopped")
            outcome = restarts.outcome(
                self._attempts,
                self._streak.restarts,
                ranks=self._settings.options.processes,
                stopping=self._state is State.LEAVING,
                max_restarts=self._settings.max_restarts,
            )
            self._streak = replace(self._streak, restarts=outcome.without_progress)
            if outcome.action == "restart":
                message = f"{outcome.reason}; starting the job again in {outcome.pause:g} s"
                if outcome.suspect is not None:
                    self._suspects.append(outcome.suspect)
                    message += f" without {outcome.suspect}, from which it has failed"
                facts = {"scope": "job", "warm": False, "attempt": len(self._attempts) + 1}
                self._events.emit("restart", message, level=logging.WARNING, **facts)
                _show(outcome.traceback)
        return outcome

    # -- one start -------------------------------------------------------------------------------------

    def _attempt(self, arguments: Sequence[str], path: str) -> None:
        attempt = Attempt(len(self._attempts) + 1)
        self._attempts.append(attempt)
        self._begun = {}
        self._events.emit("start", attempt=attempt.number, **self._started)
        shortage = Shortage(self._settings.options, self._clock)
        name, _, value = self._mark.partition("=")
        how = "mpi" if self._settings.options.mpi else "gloo"
        self._driver = driver = processes.start(
            [sys.executable, "-m", "hvdrecover.launch.run_horovodrun", how, *arguments],
            {
                **os.environ,
                **self._settings.environ,
                "PATH": path,
                "HVDRECOVER_SUPERVISOR": self._guardians.address(socket.gethostname()),
                "HVDRECOVER_HOST_REPORTS": str(self._settings.folder / _REPORTS),
                "HVDRECOVER_JOB_ID": self._job,
                "HVDRECOVER_SUSPECT": ",".join(self._suspects),
                "HVDRECOVER_CLAIMED": restarts.known(self._attempts)["root"],
                name: value,
            },
            stdin=subprocess.DEVNULL,
            new_session=True,
        )
        try:
            while driver.poll() is None and not self._is_over() and not self._lingers(attempt):
                self._serve(waits.SUPERVISION)
                self._report_shortage(shortage, attempt)
                if self._kill_at is not None and self._clock.monotonic() > self._kill_at:
                    break
            attempt.code = 1 if attempt.over or restarts.ending(self._attempts) else driver.poll() or 0
            if attempt.code < 0:
                self._report_fault("launcher_lost", f"horovodrun was killed by signal {-attempt.code}")
            self._end_attempt()
        finally:
            driver.kill()
            left = processes.kill_marked(
                self._mark, pause=self._serve, hurries=lambda: self._state is not State.TRAINING
            )
            driver.kill_group()  # last: the resource tracker must remove shared memory before
            driver.ends()
            if left:
                message = f"{processes.named(left)} can't be killed, as a disk hangs perhaps: left"
                self._events.emit("unkillable", message, level=logging.ERROR, processes=left)

    def _report_shortage(self, shortage: Shortage, attempt: Attempt) -> None:
        ends = self._kill_at is not None or {"finished", "untrained", "preempted"} & set(attempt.ends)
        if message := "" if ends else shortage.message(len(self._guardians)):
            logger.warning(message)

    def _is_over(self) -> bool:
        """Return whether a fault ends this attempt.

        A fault that another rank reported waits for the report of the rank itself. An error at the start of
        the script waits for the other ranks, so that they are counted.
        """
        fault = restarts.ending(self._attempts)
        if fault is None:
            self._heard_at = None
            return self._cannot_keep_together(self._attempts[-1])
        ranks = self._settings.options.processes
        alone = len(restarts.first_errors(self._attempts[-1])) < ranks
        patience = waits.OTHER_ERRORS if restarts.is_first(fault) and alone else 0.0
        patience = waits.HEARSAY if fault.get("heard") else patience
        since = self._heard_at = self._heard_at or self._clock.monotonic()
        if patience == waits.OTHER_ERRORS:
            all_begun = max(self._begun.values()) if len(self._begun) >= ranks else math.inf
            since = min(max(since, all_begun), since + waits.IMPORTS)
        return self._clock.monotonic() - since >= patience

    def _cannot_keep_together(self, attempt: Attempt) -> bool:
        """Have all ranks end, or start again, together (`restarts.together`); return whether they cannot."""
        guardians, options = list(self._guardians), self._settings.options
        if not attempt.rounds:
            attempt.guardians = max(attempt.guardians, len(guardians))
        now = self._clock.monotonic()
        streak = self._streak.before(attempt, now)
        decision = restarts.together(
            attempt,
            streak,
            guardians=len(guardians),
            begun=all(each.begun and not each.leaves for each in guardians),
            now=now,
            max_restarts=self._settings.max_restarts,
        )
        if decision is None or self._state is State.LEAVING:
            if all(each.done for each in guardians) and len(guardians) >= (
                options.least or options.processes
            ):
                self._guardians.order(order="exit")
            return False
        if decision.action == "wait":
            return False
        self._streak = replace(streak, error=decision.error, time=now)
        if decision.action != "restart":
            attempt.over = True
            if decision.action == "end":
                first = decision.error != streak.error
                if decision.fault in attempt.exits:
                    attempt.faults.append(decision.fault)
                decision.fault.update(final=True, again=not first)
                decision.fault["end"] = FIRST_ERROR.name if first else "script_error"
            return decision.action == "over"
        self._streak = replace(self._streak, restarts=streak.restarts + 1)
        pause = ends.pause(self._streak.restarts)
        attempt.rounds += 1
        later = f" in {pause:g} s" if pause else ""
        logger.warning("%s; all ranks start again together%s", decision.fault["message"], later)
        for each in guardians:
            each.done = False
        self._guardians.order(order="restart", pause=pause)
        return False

    def _lingers(self, attempt: Attempt) -> bool:
        """Return whether horovodrun still runs long after a finished training."""
        now = self._clock.monotonic()
        if "finished" not in attempt.ends or len(self._guardians):
            self._left_at = now
        return now - self._left_at > waits.LINGERING

    def _end_attempt(self) -> None:
        """Receive guardians' last messages, and end those that are left, on all hosts."""
        deadline = self._clock.monotonic() + waits.LAST_WORDS
        shows_error = restarts.ending(self._attempts) is not None
        self._guardians.order(order="stop", shows_error=shows_error)
        while len(self._guardians) and self._clock.monotonic() < deadline:
            self._serve(0.1)
        self._guardians.dismiss()

    def _pause(self, seconds: float) -> None:
        until = self._clock.monotonic() + seconds
        while self._state is State.TRAINING and (left := until - self._clock.monotonic()) > 0:
            self._serve(min(left, waits.SUPERVISION))
        if self._state is State.LEAVING:  # no process runs that could commit and leave
            self._state, self._code = State.STOPPED, PREEMPTED

    def _serve(self, seconds: float) -> None:
        """Wait for guardians and signals, and serve them."""
        for number in self._waking.wait(seconds):
            self._handle_signal(number)
        if self._record is not None:
            self._record.flush()
        if self._slurm is not None and self._state is State.TRAINING:
            needed = self._settings.grace + _MARGIN + _REQUEUE
            if detail := self._slurm.ends_within(needed):
                self._leave(detail)
        self._guardians.tend()
        for message in self._unreachable.news(self._guardians.hosts) if self._unreachable else ():
            logger.warning(message)
        if self._stall is not None and (self._stall.complete or self._clock.monotonic() > self._stall_due):
            self._report_stall(self._stall)

    def _handle_signal(self, number: int) -> None:
        if number == signal.SIGQUIT:
            self._guardians.order(order="stacks")
        elif number in self._config.stop_signals and not self._signalled:
            self._signalled = True  # the job may be leaving already, by the batch system's plan
            name = signal.Signals(number).name
            if self._state is State.TRAINING:
                self._leave(name)
            else:
                logger.info("%s: the job leaves already", name)
        elif number != signal.SIGCHLD:
            if self._state is not State.STOPPED:
                self._code = PREEMPTED if self._state is State.LEAVING else processes.exit_code(-number)
            self._state = State.STOPPED
            self._guardians.order(order="stop")
            self._kill_at = self._clock.monotonic()  # kill everything at once

    def _leave(self, detail: str) -> None:
        """Have the job leave at its next commit."""
        self._state = State.LEAVING
        self._announcement.leaves()
        grace = self._settings.grace
        attempt = self._attempts[-1]
        commits = attempt.in_run or attempt.committed or not self._guardians
        what = "the job leaves at its next commit" if commits else "the script gets SIGTERM, and ends"
        message = f"{detail}: {what}, within {grace:g} s"
        self._events.emit("fault", message, level=logging.WARNING, fault="preemption", detail=detail)
        self._guardians.order(order="leave", grace=grace)
        self._kill_at = self._clock.monotonic() + grace + _MARGIN

    # -- guardians -------------------------------------------------------------------------------------

    def _greeting(self) -> list[Message]:
        know: Message = {"order": "know", **restarts.known(self._attempts)}
        leave: Message = {"order": "leave", "grace": self._settings.grace}
        return [know, leave] if self._state is State.LEAVING else [know]

    def _hear(self, guardian: Guardian, message: Message) -> None:
        if message.get("kind") == "event":
            if self._record is not None:
                # Hosts' clocks differ, so an event gets its time here. A message may be read late, but the
                # events of one guardian keep their order.
                guardian.reported = max(guardian.reported, self._clock.now() - message["age"])
                self._record.put({**message["event"], "time": guardian.reported})
            return
        attempt = self._attempts[-1]
        commit = message.get("commit")
        if isinstance(commit, list):
            guardian.commit = commit
            attempt.committed = attempt.committed or int(commit[1]) > 0
        if attempt.committed:
            attempt.root = message.get("root") or attempt.root
        if message.get("begun") or message.get("kind") in ("end", "fault"):
            self._begun.setdefault(f"{guardian.host}/{guardian.slot}", self._clock.monotonic())
        if "point" in message:
            changed, steps = message["point"]
            attempt.point = max(attempt.point, (int(changed), int(steps)))
        guardian.begun = guardian.begun or bool(message.get("begun"))
        if message.get("in_run") and not attempt.in_run:
            attempt.in_run = True
            self._guardians.order(order="know", **restarts.known(self._attempts))
        if message.get("kind") == "done":
            guardian.done = message["round"] == attempt.rounds
            guardian.leaves = bool(message["stops"])
            if message["exit"] == 0:
                attempt.exits.append({**message, "at": f"{guardian.host}/{guardian.slot}"})
        elif message.get("kind") == "end":
            guardian.ended = True
            attempt.ends.append(str(message.get("how")))
        elif message.get("kind") == "diverged":
            self._report_host(guardian.host)  # discovery excludes a host that is reported twice
        elif message.get("kind") == "stalled":
            missing = {int(rank): names for rank, names in message["missing"].items()}
            self._stall = Stall(missing, float(message["seconds"]))
            self._stall_due = self._clock.monotonic() + waits.PLACES
            self._guardians.order(order="where", ranks=list(missing))
        elif message.get("kind") == "where" and self._stall is not None:
            self._stall.places[int(message["rank"])] = message["place"]
        elif message.get("kind") == "fault":
            guardian.ended = bool(message.get("final"))
            # A guardian that was ordered to start again since then is not done.
            guardian.done = message.get("round") == attempt.rounds
            at, now = f"{guardian.host}/{guardian.slot}", self._clock.monotonic()
            attempt.faults.append({**message, "at": at, "time": now})
            of_host = message.get("fault") in ends.OF_HOSTS and message.get("end") != "apart"
            if guardian.ended and of_host:
                self._report_host(guardian.host)

    def _report_stall(self, stall: Stall) -> None:
        self._stall = None
        if message := stall.message():
            facts = {"seconds": stall.seconds, "missing": stall.missing}
            self._events.emit("stalled", message, level=logging.WARNING, **facts)

    def _report_host(self, host: str) -> None:
        try:
            self._disk(selection.report_failure, self._settings.folder / _REPORTS, host, self._clock.now())
        except OSError as error:
            logger.warning("that %s fails could not be noted: %s", host, error)

    def _lost(self, guardian: Guardian) -> None:
        """Report a guardian whose connection has ended without a message: it or its host is lost."""
        if self._driver.poll() is None:
            detail = f"{guardian.host} slot {guardian.slot}: its guardian is gone, perhaps with its host"
            self._report_fault("lost_host", detail, slot=guardian.slot, commit=guardian.commit)

    def _report_fault(self, kind: str, detail: str, **facts: Any) -> None:
        self._attempts[-1].faults.append({"fault": kind, "message": detail, "time": self._clock.monotonic()})
        self._events.emit("fault", detail, level=logging.WARNING, fault=kind, detail=detail, **facts)

    def _say_end(self, outcome: Outcome) -> None:
        level = logging.INFO if outcome.code == 0 and not outcome.message else logging.WARNING
        facts = {"code": outcome.code, "reason": outcome.reason}
        self._events.emit("end", outcome.message or outcome.reason, level=level, **facts)
        _show(outcome.traceback)


def _show(text: str) -> None:
    # If the terminal is closed, even an empty text fails, as earlier lines are still buffered. This error
    # must not change the exit code, which schedulers act on.
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
