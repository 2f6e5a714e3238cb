"""The supervisor of a job: starts ``horovodrun``, and starts it again when Horovod gives up.

1. Start ``horovodrun`` (an `Attempt`). It starts a guardian for each slot, here and through ssh. Each
   guardian connects back, and is told the facts of earlier attempts (`ends.known`).
2. Until ``horovodrun`` ends, hear the guardians: commits, faults, events, ends. A fault that no restart in
   place can mend ends the attempt at once (`ends.ending`).
3. Then hear last messages, stop the guardians that are left, and kill every process of the job on this host.
   They are known by a mark in their environment.
4. Decide (`ends.outcome`): the job is over, or starts again after a pause, from its newest commit, in
   its hosts' memory or at the checkpoint root.

A stop signal, or Slurm's plan to end the job, makes the job leave (`JobState.LEAVING`): all ranks make one
more commit and exit, within the grace. Any other signal, or a second one, stops it at once
(`JobState.STOPPED`).
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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Any

from hvdrecover import machine
from hvdrecover.checkpoint import redact
from hvdrecover.config import PREEMPTED, Config
from hvdrecover.discovery import selection
from hvdrecover.errors import ConfigError, DiscoveryError, LaunchError
from hvdrecover.events import Events, Record
from hvdrecover.launch import ends, horovodrun, presence, processes, ssh, waits
from hvdrecover.launch.ends import FIRST_ERROR, Attempt, Outcome
from hvdrecover.launch.link import ConnectedGuardian, Guardians, Message
from hvdrecover.launch.presence import Supervised
from hvdrecover.launch.processes import Waking
from hvdrecover.launch.slurm import SlurmJob
from hvdrecover.machine import SYSTEM_CLOCK, Bounded, Clock

logger = logging.getLogger(__name__)

WORKER = (sys.executable, "-m", "hvdrecover", "worker", "--")  # a guardian's command
_MARGIN = 5.0  # seconds after the grace before everything is killed
_REQUEUE = 10.0  # seconds beyond these for a controller to take a requeue before it ends the job
_REPORTS = "failing-hosts"  # file of hosts with given-up or diverged slots, which discovery excludes


class JobState(Enum):
    """The states of a supervisor; each may only be followed by a later one."""

    TRAINING = auto()
    LEAVING = auto()  # the ranks have been asked to leave at their next commit
    STOPPED = auto()  # everything is killed


class Supervisor:
    def __init__(
        self,
        command: Sequence[str],
        options: horovodrun.Options,
        environ: Mapping[str, str],
        config: Config,
        slurm: SlurmJob | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        assert config.events is not None
        self._command = list(command)
        self._redacted = list(map(redact, command))
        if not (options.hosts or options.hostfile or options.discovery or options.mpi):
            options = replace(options, hosts=f"localhost:{options.processes}")
        self._options = options
        self._ranks, self._least = options.processes, options.least or options.processes
        self._environ = environ  # on top of this process's own environment
        self._config = config
        self._folder = config.events  # the run's folder
        self._slurm = slurm
        self._clock = clock
        self._record = Record(self._folder, waits.DISK)
        self._events = Events(self._record.add, config.host, clock)
        self._disk = Bounded(waits.DISK)
        self._mark = f"{ssh.MARK}={secrets.token_hex(16)}"
        self._job = secrets.token_hex(16)
        signals = _heeded(config.stop_signals)
        self._supervised = Supervised(
            host=socket.gethostname(),
            pid=os.getpid(),
            process=machine.identity(),
            began=clock.now(),
            command=self._redacted,
            processes=self._ranks,
            least=self._least,
            stop_signal=signals[0].name if signals else "",
            grace=config.grace,
        )
        self._state, self._code = JobState.TRAINING, 0  # the exit code of a job that is stopped
        self._signalled = False
        self._attempts: list[Attempt] = []
        self._streak = ends.Streak()
        self._suspects: list[str] = []
        self._heard_at: float | None = None  # when the fault was reported that ends this attempt
        self._kill_at: float | None = None
        self._short_since = 0.0  # since when processes are missing, or none is
        self._left_at = 0.0  # when a finished training last had guardians

    def run(self) -> int:
        """Keep the job going until its training is finished or given up; return the exit code (`ends`)."""
        signals = {*self._config.stop_signals, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT}
        heeded = _heeded(signals)
        arguments = self._arguments(self._options)
        processes.allow_open_files()  # one connection per slot, and those of horovodrun
        try:
            path = ssh.kept_alive(self._config, self._folder)
            announcement = presence.announce(self._folder, self._supervised)
        except OSError as error:
            problem = f"can't be written to: {error.strerror}; name another folder: HVDRECOVER_EVENTS=FOLDER"
            raise LaunchError(str(self._folder), problem) from error
        with Waking((*heeded, signal.SIGCHLD)) as self._waking:
            self._guardians = Guardians(
                self._waking.selector, self._hear, self._lost, self._greeting, clock=self._clock
            )
            if self._slurm is not None:
                self._slurm.watch()
            try:
                outcome = self._keep_going(arguments, path)
            finally:
                self._guardians.close()
                with contextlib.suppress(OSError):
                    self._disk(announcement.unlink)
        level = logging.INFO if outcome.code == 0 and not outcome.message else logging.WARNING
        facts = {"code": outcome.code, "reason": outcome.reason}
        self._events.emit("end", outcome.message or outcome.reason, level=level, **facts)
        _show(outcome.traceback)
        if self._slurm is not None and outcome.code == PREEMPTED:
            self._slurm.requeue(committed=any(attempt.committed for attempt in self._attempts))
        return outcome.code

    def _arguments(self, options: horovodrun.Options) -> list[str]:
        return horovodrun.arguments(options, [*WORKER, *self._command])

    def _keep_going(self, arguments: Sequence[str], path: str) -> Outcome:
        while True:
            if self._state is not JobState.STOPPED:
                self._attempt(arguments, path)
            if self._state is JobState.STOPPED:
                return Outcome("end", self._code, "stopped")
            restarts, stopping = self._streak.restarts, self._state is JobState.LEAVING
            facts: dict[str, Any] = {"stopping": stopping, "max_restarts": self._config.max_restarts}
            outcome = ends.outcome(self._attempts, restarts, ranks=self._ranks, **facts)
            if outcome.action == "end":
                return outcome
            self._streak = replace(self._streak, restarts=outcome.without_progress)
            message = f"{outcome.reason}; starting the job again in {outcome.pause:g} s"
            if outcome.suspect is not None:
                self._suspects.append(outcome.suspect)
                message += f" without {outcome.suspect}, from which it has failed"
            facts = {"scope": "job", "warm": False, "attempt": len(self._attempts) + 1}
            self._events.emit("restart", message, level=logging.WARNING, **facts)
            _show(outcome.traceback)
            self._pause(outcome.pause)
            # Horovod's `-np` is how many processes it waits for; it starts one in each slot that it finds.
            if self._least < self._ranks:
                bounded = Bounded(waits.DISCOVERY)
                with contextlib.suppress(ConfigError, DiscoveryError, OSError):  # then as before
                    arguments = bounded(self._arguments, replace(self._options, processes=self._least))

    def _pause(self, seconds: float) -> None:
        until = self._clock.monotonic() + seconds
        while self._state is JobState.TRAINING and (left := until - self._clock.monotonic()) > 0:
            self._serve(min(left, waits.SUPERVISION))
        if self._state is JobState.LEAVING:  # no process runs that could commit and leave
            self._state, self._code = JobState.STOPPED, PREEMPTED

    # -- one start -------------------------------------------------------------------------------------

    def _attempt(self, arguments: Sequence[str], path: str) -> None:
        attempt = Attempt(len(self._attempts) + 1)
        self._attempts.append(attempt)
        facts: dict[str, Any] = {"machine": machine.describe(), "versions": machine.versions()}
        self._events.emit("start", attempt=attempt.number, command=self._redacted, **facts)
        self._driver = driver = self._start(arguments, path)
        try:
            while driver.poll() is None and not self._is_over() and not self._lingers(attempt):
                self._serve(waits.SUPERVISION)
                self._report_shortage(attempt)
                if self._kill_at is not None and self._clock.monotonic() > self._kill_at:
                    break
            attempt.code = 1 if attempt.over or ends.ending(self._attempts) else driver.poll() or 0
            if attempt.code < 0:
                self._report_fault("launcher_lost", f"horovodrun was killed by signal {-attempt.code}")
            deadline = self._clock.monotonic() + waits.LAST_WORDS
            self._guardians.order(order="stop")
            while len(self._guardians) and self._clock.monotonic() < deadline:
                self._serve(0.1)  # for last messages
            self._guardians.dismiss()
        finally:
            driver.kill()
            left = processes.kill_marked(
                self._mark, pause=self._serve, hurries=lambda: self._state is not JobState.TRAINING
            )
            driver.kill_group()  # last: the resource tracker must remove shared memory before
            driver.ends()
            if left:
                message = f"{processes.named(left)} can't be killed, as a disk hangs perhaps: left"
                self._events.emit("unkillable", message, level=logging.ERROR, processes=left)

    def _report_shortage(self, attempt: Attempt) -> None:
        present, wanted, now = len(self._guardians), self._ranks, self._clock.monotonic()
        over = self._kill_at is not None or {"finished", "untrained", "preempted"} & set(attempt.ends)
        if over or attempt.guardians < wanted or not 0 < present < wanted:
            self._short_since = now
        if self._options.least is None and not self._options.mpi and now - self._short_since > waits.SPARE:
            self._short_since = math.inf
            logger.warning(
                f"{present} of {wanted} processes are left; the job waits until {wanted} run again, up to "
                f"Horovod's --elastic-timeout. With --min-np {present} it would resume with what is left"
            )

    def _start(self, arguments: Sequence[str], path: str) -> processes.Child:
        name, _, value = self._mark.partition("=")
        how = "mpi" if self._options.mpi else "gloo"
        command = [sys.executable, "-m", "hvdrecover.launch.horovodrun", how, *arguments]
        environ = {
            **os.environ,
            **self._environ,
            "PATH": path,
            "HVDRECOVER_SUPERVISOR": self._guardians.address(socket.gethostname()),
            "HVDRECOVER_HOST_REPORTS": str(self._folder / _REPORTS),
            "HVDRECOVER_JOB_ID": self._job,
            "HVDRECOVER_SUSPECT": ",".join(self._suspects),
            "HVDRECOVER_CLAIMED": ends.known(self._attempts)["root"],
            name: value,
        }
        return processes.start(command, environ, stdin=subprocess.DEVNULL, new_session=True)

    def _is_over(self) -> bool:
        fault = ends.ending(self._attempts)
        if fault is None:
            self._heard_at = None
            return self._cannot_keep_together(self._attempts[-1])
        now = self._clock.monotonic()
        self._heard_at = self._heard_at or now
        # A fault that another rank reported waits for the report of the rank itself.
        return now - self._heard_at >= (waits.HEARSAY if fault.get("heard") else 0.0)

    def _cannot_keep_together(self, attempt: Attempt) -> bool:
        """Have all ranks end, or start again, together (`ends.together`); return whether they cannot."""
        guardians, now = list(self._guardians), self._clock.monotonic()
        if not attempt.rounds:
            attempt.guardians = max(attempt.guardians, len(guardians))
        streak = self._streak.before(attempt, now)
        decision = ends.together(
            attempt,
            streak,
            guardians=len(guardians),
            begun=all(each.begun and not each.leaves for each in guardians),
            now=now,
            max_restarts=self._config.max_restarts,
        )
        if decision is None or self._state is JobState.LEAVING:
            if len(guardians) >= self._least and all(each.done for each in guardians):
                self._guardians.order(order="exit")
            return False
        if decision.action == "wait":
            return False
        self._streak = replace(streak, error=decision.error, time=now)
        if decision.action != "end" and decision.fault["fault"] == "script_error":
            _show_error(decision.fault)
        if decision.action == "restart":
            self._restart_together(attempt, decision.fault)
            return False
        attempt.over = True
        if decision.action == "end":
            again = decision.error == streak.error
            if decision.fault in attempt.exits:
                attempt.faults.append(decision.fault)
            end = "script_error" if again else FIRST_ERROR.name
            decision.fault.update(final=True, again=again, end=end)
        return decision.action == "over"

    def _restart_together(self, attempt: Attempt, fault: ends.Fault) -> None:
        self._streak = replace(self._streak, restarts=self._streak.restarts + 1)
        attempt.rounds += 1
        pause = ends.pause(self._streak.restarts)
        later = f" in {pause:g} s" if pause else ""
        logger.warning("%s; all ranks start again together%s", fault["message"], later)
        for each in self._guardians:
            each.done = False
        self._guardians.order(order="restart", pause=pause)

    def _lingers(self, attempt: Attempt) -> bool:
        """Return whether horovodrun still runs long after a finished training."""
        now = self._clock.monotonic()
        if "finished" not in attempt.ends or len(self._guardians):
            self._left_at = now
        return now - self._left_at > waits.LINGERING

    # -- signals ---------------------------------------------------------------------------------------

    def _serve(self, seconds: float) -> None:
        for number in self._waking.wait(seconds):
            self._handle_signal(number)
        self._record.flush()  # no deadline: the record bounds it
        needed = self._config.grace + _MARGIN + _REQUEUE
        trains = self._state is JobState.TRAINING
        if trains and self._slurm is not None and (detail := self._slurm.ends_within(needed)):
            self._leave(detail)
        self._guardians.tend()

    def _handle_signal(self, number: int) -> None:
        if number == signal.SIGQUIT:
            self._guardians.order(order="stacks")
        elif number in self._config.stop_signals and not self._signalled:
            self._signalled = True  # the job may be leaving already, by the batch system's plan
            name = signal.Signals(number).name
            if self._state is JobState.TRAINING:
                self._leave(name)
            else:
                logger.info("%s: the job leaves already", name)
        elif number != signal.SIGCHLD:
            if self._state is not JobState.STOPPED:
                self._code = PREEMPTED if self._state is JobState.LEAVING else processes.exit_code(-number)
            self._state = JobState.STOPPED
            self._guardians.order(order="stop")
            self._kill_at = self._clock.monotonic()  # kill everything at once

    def _leave(self, detail: str) -> None:
        self._state = JobState.LEAVING
        with contextlib.suppress(OSError):
            self._disk(presence.announce, self._folder, replace(self._supervised, leaving=True))
        grace, attempt = self._config.grace, self._attempts[-1]
        commits = attempt.in_run or attempt.committed or not self._guardians
        what = "the job leaves at its next commit" if commits else "the script gets SIGTERM, and ends"
        message = f"{detail}: {what}, within {grace:g} s"
        self._events.emit("fault", message, level=logging.WARNING, fault="preemption", detail=detail)
        self._guardians.order(order="leave", grace=grace)
        self._kill_at = self._clock.monotonic() + grace + _MARGIN

    # -- guardians -------------------------------------------------------------------------------------

    def _greeting(self) -> list[Message]:
        know: Message = {"order": "know", **ends.known(self._attempts)}
        leave: Message = {"order": "leave", "grace": self._config.grace}
        return [know, leave] if self._state is JobState.LEAVING else [know]

    def _hear(self, guardian: ConnectedGuardian, message: Message) -> None:
        match message["kind"]:
            case "event":
                # Hosts' clocks differ, so an event gets its time here. A message may be read late, but the
                # events of one guardian keep their order.
                guardian.reported = max(guardian.reported, self._clock.now() - message["age"])
                self._record.put({**message["event"], "time": guardian.reported})
            case "diverged":
                self._report_host(guardian.host)  # discovery excludes a host that is reported twice
            case "stalled":
                self._guardians.order(order="stacks", ranks=message["ranks"])
            case "commit":
                self._hear_progress(guardian, message)
            case "end":
                self._hear_progress(guardian, message)
                guardian.ended = True
                self._attempts[-1].ends.append(message["how"])
                if ends.ending(self._attempts) is None:
                    _show(message["traceback"])
            case "done" | "fault":
                self._hear_progress(guardian, message)
                self._hear_death(guardian, message)

    def _hear_progress(self, guardian: ConnectedGuardian, message: Message) -> None:
        attempt = self._attempts[-1]
        guardian.commit = message["commit"]
        guardian.begun |= bool(message.get("begun"))
        attempt.committed |= message["commit"][1] > 0
        attempt.point = max(attempt.point, tuple(message.get("point", (0, 0))))
        if attempt.committed:
            attempt.root = message.get("root") or attempt.root
        if message.get("in_run") and not attempt.in_run:
            attempt.in_run = True
            self._guardians.order(order="know", **ends.known(self._attempts))

    def _hear_death(self, guardian: ConnectedGuardian, message: Message) -> None:
        attempt = self._attempts[-1]
        # A guardian that was ordered to start again since then is not done.
        guardian.done = message.get("round") == attempt.rounds
        death = {**message, "at": f"{guardian.host}/{guardian.slot}", "time": self._clock.monotonic()}
        if message["kind"] == "done":
            guardian.leaves = message["stops"]
            if message["exit"] == 0 and not message["stops"]:
                attempt.exits.append(death)
            elif message["fault"] == "script_error":
                _show_error(death)
            return
        guardian.ended = bool(message.get("final"))
        attempt.faults.append(death)
        if message.get("round") is None and message["end"] != FIRST_ERROR.name:
            logger.warning(message["message"])
            # An error that ends the job is shown with the outcome.
            if ends.ending(self._attempts) is None or ends.BY_NAME[message["end"]].repair == "job":
                _show_error(death)
        if guardian.ended and message["fault"] in ends.OF_HOSTS and message["end"] != "apart":
            self._report_host(guardian.host)

    def _report_host(self, host: str) -> None:
        try:
            self._disk(selection.report_failure, self._folder / _REPORTS, host, self._clock.now())
        except OSError as error:
            logger.warning("that %s fails could not be noted: %s", host, error)

    def _lost(self, guardian: ConnectedGuardian) -> None:
        """Report a guardian whose connection has ended without a message: it or its host is lost."""
        if self._driver.poll() is None:
            detail = f"{guardian.host} slot {guardian.slot}: its guardian is gone, perhaps with its host"
            self._report_fault("lost_host", detail, slot=guardian.slot, commit=guardian.commit)

    def _report_fault(self, kind: str, detail: str, **facts: Any) -> None:
        self._attempts[-1].faults.append({"fault": kind, "message": detail, "time": self._clock.monotonic()})
        self._events.emit("fault", detail, level=logging.WARNING, fault=kind, detail=detail, **facts)


def _heeded(signals: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that the caller has not had this process ignore."""
    return [number for number in signals if signal.getsignal(number) is not signal.SIG_IGN]


def _show_error(death: Mapping[str, Any]) -> None:
    """Print the error that ended a process, unless the process did."""
    if death["unprinted"]:
        _show(death["traceback"])


def _show(text: str) -> None:
    # If the terminal is closed, even an empty text fails, as earlier lines are still buffered. This error
    # must not change the exit code, which schedulers act on.
    with contextlib.suppress(OSError):
        sys.stderr.write(text)
