"""The guardian of one slot: starts its training process, watches it, and restarts it in place.

1. Start the training process. Its page (`hvdrecover.heartbeat`) says in which phase it is, and how far.
2. Look at it five times a second (`State.WATCHING`). Kill it if it makes no progress for longer than
   `hangs.limit` allows. In calm training, start a standby beside it.
3. When it ends, find out how (`ends.end`). It may have finished or left: then the guardian ends, too.
4. Else repair it: after a pause (`State.PAUSING`, none at the first death), wake the standby, or start a new
   process. Horovod's driver never learns of the death, so it blacklists nothing.
5. After too many deaths without progress, or an error that a restart cannot mend, give the slot up. If the
   supervisor has to end the job, wait for that (`State.DISMISSED`): Horovod ends all ranks as soon as one
   guardian exits, and the other ranks must report their errors first.

A process outside a function decorated by `run` does not survive the loss of other ranks, so steps 3 to 5 are
others there: the guardian reports its end, and waits (`State.DISMISSED`). The supervisor has all guardians of
the job start their processes again together, or end (`restarts.together`).

At any time: a stop signal or the supervisor's order asks the process to leave at its next commit; when the
grace is over, it is killed. If the supervisor or the launcher is gone, the guardian kills it, too, and ends.
"""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import Any

from hvdrecover.clock import SYSTEM_CLOCK, Clock
from hvdrecover.config import PREEMPTED, Config, environment, open_mpi
from hvdrecover.errors import LaunchError
from hvdrecover.heartbeat import Phase, Reading, Stop
from hvdrecover.launch import ends, hangs, processes, python_command, slurm, waits
from hvdrecover.launch.ends import FIRST_ERROR, Death, End, Record
from hvdrecover.launch.hangs import Limits
from hvdrecover.launch.reports import Reports
from hvdrecover.launch.signals import Waking
from hvdrecover.launch.stacks import Whereabouts
from hvdrecover.launch.standby import Readiness
from hvdrecover.launch.training import Training

logger = logging.getLogger(__name__)

_REPORT = 5.0  # seconds between reports of the last commit to the supervisor
_SUSPENDED = 5.0  # seconds between looks after which this process, too, must have been stopped
_LONGEST_DETAIL = 10_000  # characters of an error in an event; the traceback has all of it


@dataclass(frozen=True)
class Settings:
    """The user's settings of a guardian."""

    limits: Limits = field(default_factory=Limits)  # when a process counts as hanging
    grace: float = 30.0  # seconds for a process to leave after a preemption
    standby: bool = True  # whether a standby is kept


class State(Enum):
    """The states of a guardian; `Guardian._LOOKS` has the action in each."""

    WATCHING = auto()  # the training process runs, or has just ended
    PAUSING = auto()  # it has ended, and is started again when the pause is over
    DISMISSED = auto()  # the process has ended; the supervisor decides about the job, or ends it


class Guardian:
    """Starts the training process of one slot, and restarts it in place."""

    def __init__(
        self,
        command: Sequence[str],
        environ: dict[str, str],
        settings: Settings,
        config: Config,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._command = list(command)
        self._environ = environ
        self._settings = settings
        self._config = config
        self._clock = clock
        self._reports = Reports(config, clock)
        self._whereabouts = Whereabouts(config, self._reports)
        program = python_command.parse(command)
        self._wrapped = program is None  # the exit code may be a shell's
        self._readiness = Readiness(program if settings.standby and config.elastic else None, environ)
        self._record = Record()
        self._state, self._until, self._code = State.WATCHING, 0.0, 0  # the end of a pause; the exit code
        self._hung: float | None = None  # seconds without progress for which the process was killed
        self._divergences = 0
        self._stop_by: float | None = None  # when a process that was asked to leave is killed
        self._signalled = self._handed_on = False
        self._signals: list[int] = []
        self._told = (False, False)  # last report to the supervisor: process has begun, is in `run`
        self._how = ""  # how the slot ends when the supervisor dismisses it
        self._round = 0  # how often all ranks have started again together
        self._began = clock.monotonic()  # when the process had imported an adapter
        self._ticked = self._reported = clock.monotonic()
        self._memory_kills = processes.memory_kills()
        self._training: Training

    def run(self) -> int:
        """Keep the slot running until its work is done or given up; return the exit code.

        This is the exit code of the training process, 128 plus the signal's number if it was killed, or 75 if
        it left after a preemption. Raises `LaunchError` if the command cannot be started.
        """
        processes.die_with_parent(signal.SIGHUP)  # handled here, even if nohup ignores it
        heeded = (*self._config.stop_signals, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        with Waking((*heeded, signal.SIGCHLD)) as waking:
            self._reports.connect()
            try:
                python_command.check_script(self._command)
                self._training = self._start()
            except LaunchError as error:
                if not self._reports.is_supervised:
                    raise
                self._reports.cannot_start(error, waking, waits.DISMISSAL)
                return 1
            self._reports.listen(waking.selector, self._follow_orders)
            try:
                code = None
                while code is None:
                    self._signals += waking.wait(waits.LOOK)
                    code = self._look()
                return code
            finally:
                self._training.kill()
                self._reports.forward(self._training)
                self._training.close()
                self._readiness.drop()

    def _look(self) -> int | None:
        """Act on signals, on a lost supervisor, and on the state; return the exit code when the slot ends."""
        while self._signals:
            if (code := self._handle_signal(self._signals.pop(0))) is not None:
                return code
        if reason := self._reports.lost():
            return self._abandon(reason)
        return self._LOOKS[self._state](self)

    # -- the states ------------------------------------------------------------------------------------

    def _watch(self) -> int | None:
        if self._training.returncode is not None:
            return self._died(self._training.returncode)
        now = self._clock.monotonic()
        if now - self._ticked > _SUSPENDED:  # this host was suspended: no process could report progress
            self._training.page.touch()
        self._ticked = now
        reading = self._training.read()
        self._note(reading)
        self._whereabouts.report_stall(self._training, reading)
        self._training.page.allow_stalls(*hangs.stalls(reading, self._settings.limits))
        if self._stop_by is not None and now > self._stop_by:
            name = self._reports.name(reading)
            logger.warning("the grace is over: %s stops; its last durable commit stands", name)
            self._kill()
        elif hangs.is_hanging(reading, self._settings.limits, joins=self._record.joined):
            self._end_hang(reading)
        elif self._stop_by is not None:
            self._hand_on_stop(reading)
        else:
            self._readiness.keep(self._training, reading, now)
        if (ready := self._readiness.news()) is not None:
            self._reports.events.emit("standby", slot=self._config.local_rank, ready=ready)
        told = reading.phase != Phase.UNKNOWN, reading.in_run
        if now - self._reported > _REPORT or told != self._told:
            self._began = now if told[0] and not self._told[0] else self._began
            self._reported, self._told = now, told
            self._record.note_root(self._training.notes())
            facts = {
                "commit": [reading.generation, reading.commit],
                "point": self._record.farthest,
                "root": self._record.root,
            }
            self._reports.send(kind="commit", begun=told[0], in_run=told[1], **facts)
        return None

    def _pause(self) -> int | None:
        """Restart the training process in place as soon as the pause is over."""
        if self._stop_by is not None:
            return self._end("stopped", PREEMPTED)
        if self._clock.monotonic() < self._until:
            return None
        before = self._training.read()
        self._reports.forward(self._training)
        self._training.close()
        self._divergences = 0
        woken = self._readiness.wake(self._record.handed_down)
        self._training = woken or self._start(rejoins=True)
        self._training.page.has_seen(before.longest, before.longest_beginning)
        self._ticked, self._state = self._clock.monotonic(), State.WATCHING
        attempt = self._record.deaths + self._round
        self._reports.events.emit("restart", scope="slot", warm=woken is not None, attempt=attempt)
        return None

    def _wait_for_dismissal(self) -> int | None:
        if self._clock.monotonic() <= self._until:
            return None
        return self._end(self._how, self._code) if self._how else self._code

    _LOOKS: Mapping[State, Callable[[Guardian], int | None]] = MappingProxyType(
        {State.WATCHING: _watch, State.PAUSING: _pause, State.DISMISSED: _wait_for_dismissal}
    )

    # -- signals and orders ----------------------------------------------------------------------------

    def _handle_signal(self, number: int) -> int | None:
        """Act on a signal; return the exit code if it ends the guardian."""
        if number == signal.SIGQUIT:
            self._whereabouts.show(self._training)
        elif number in self._config.stop_signals and not self._signalled:
            # may come together with the supervisor's order: a batch system signals all processes
            self._signalled = True
            if self._stop_by is None:
                self._ask(Stop.HOST, self._settings.grace)
        elif number != signal.SIGCHLD:
            self._kill()
            return self._end("stopped", processes.exit_code(-number))
        return None

    def _ask(self, stop: Stop, grace: float) -> None:
        """Ask the training process to leave at its next commit."""
        self._stop_by = self._clock.monotonic() + grace
        self._hand_on_stop(self._training.read())
        self._training.page.ask(stop)

    def _hand_on_stop(self, reading: Reading) -> None:
        """Hand SIGTERM to a script that has no commits to leave at, once."""
        if reading.phase in (Phase.UNKNOWN, Phase.PLAIN) and not self._handed_on:
            self._handed_on = True
            self._training.process.terminate()

    def _follow_orders(self) -> None:
        """Carry out the supervisor's orders."""
        for message in self._reports.receive():
            match message.get("order"):
                case "leave":
                    self._ask(Stop.JOB, float(message["grace"]))
                case "stop":
                    if message.get("shows_error"):  # this rank may have the same error
                        self._training.leave_error()
                    self._signals.append(signal.SIGHUP)
                case "stacks":
                    self._whereabouts.show(self._training)
                case "know":
                    self._record.learn(message)
                case "restart":
                    self._start_again(float(message["pause"]))
                case "exit":
                    self._until = 0.0
                case "where":
                    self._whereabouts.report(self._training, message["ranks"])

    def _abandon(self, reason: str) -> int:
        """End, because the supervisor or the launcher is gone."""
        # otherwise the supervisor or another guardian reports it
        if self._config.is_first_of_host and not self._reports.is_supervised:
            rank = self._training.read().rank
            self._reports.report("fault", f"{reason}: stopping", rank, fault="launcher_lost", detail=reason)
        self._kill()
        code = self._end("stopped", processes.exit_code(-signal.SIGHUP))
        if self._config.is_first_of_host:
            slurm.leave_heir(self._environ, self._config.host)
        return code

    # -- the end of a training process -----------------------------------------------------------------

    def _died(self, returncode: int) -> int | None:
        """Restart the training process in place, or return the code to exit with."""
        kills, notes, reading = processes.memory_kills(), self._training.notes(), self._training.read()
        returncode = processes.returncode_of(returncode) if self._wrapped else returncode
        error = notes if returncode >= 0 else {}  # a signal ended it, not the error that it noted before
        death = Death(
            returncode,
            reading,
            hung=self._hung is not None,
            out_of_memory=kills > self._memory_kills,
            error=str(error.get("error", "")),
            identity=str(error.get("identity", "")),
            kinds=tuple(error.get("kinds", ())),
            lost="" if self._record.in_run or reading.in_run else str(notes.get("lost", "")),
        )
        self._memory_kills = kills
        self._note(reading)  # before the fault, in the order in which things happened
        self._record.note_root(notes)
        end = ends.end(death, first=not self._record.committed)
        supervised = self._reports.is_supervised and self._config.elastic
        if supervised and not self._record.in_run and reading.phase != Phase.FINISHED:
            if self._stop_by is not None and end.name != "left":
                self._await_all(death, end, notes, "stopped", PREEMPTED)
                return None
            if end.repair == "in place" or end.name in ("untrained", "dismissed", FIRST_ERROR.name):
                self._await_all(death, end, notes, "untrained", 0)
                return None
        if end.code == 0:
            return self._end(end.name, 0)
        if self._stop_by is not None or end.name == "left":
            whole = notes.get("left") == "job"
            how = "preempted" if whole else "left" if end.name == "left" else "stopped"
            return self._end(how, PREEMPTED)
        if end.repair == "none":
            return self._end("stopped", processes.exit_code(returncode))
        return self._repair(death, end, notes)

    def _repair(self, death: Death, end: End, notes: dict[str, Any]) -> int | None:
        """Decide whether the process is restarted, report its death, and enter the next state."""
        reason = self._cannot_restart(death, end)
        ends_job = self._reports.is_supervised and (end.repair == "end" or reason == ends.SAME_ERROR)
        if ends_job:  # the supervisor shows its error, once for all ranks, and last
            self._training.leave_error()
        self._training.show_error()
        pause = ends.pause(self._record.deaths)
        by = "by its standby" if self._readiness.is_warm else "in place"
        follows = f"given up: {reason}" if reason else f"restarted {by}{f' in {pause:g} s' if pause else ''}"
        self._report_death(death, end, notes, follows, final=bool(reason), again=reason == ends.SAME_ERROR)
        self._hung = None
        now = self._clock.monotonic()
        if not reason:
            self._state, self._until = State.PAUSING, now + pause
            return self._pause()
        self._reports.events.emit("gave_up", scope="slot", reason=reason)
        self._code = end.code or processes.exit_code(death.returncode) or 1
        self._state, self._until = State.DISMISSED, now + waits.DISMISSAL
        return None if ends_job else self._code

    def _await_all(self, death: Death, end: End, notes: dict[str, Any], how: str, code: int) -> None:
        """Report the end of a process outside `run`, and wait: all ranks start again, or end, together."""
        ended = self._stop_by is not None or (death.returncode == 0 and not death.error)
        if ends.fault(death) != "script_error":
            self._training.leave_error()  # an error caused by the loss of another rank adds nothing
        self._report_death(death, end, notes, "", ended=ended, round=self._round)
        self._hung = None
        self._how, self._code = how, code
        self._state, self._until = State.DISMISSED, math.inf

    def _start_again(self, pause: float) -> None:
        """Start the process again, together with all other guardians of the job."""
        if self._stop_by is not None:
            return
        if self._state is State.WATCHING:  # its error, if any, comes from the fault that is already known
            self._kill()
            self._training.leave_error()
        self._training.show_error()
        self._record.restarted = True
        self._round += 1
        self._how, self._hung = "", None
        self._state, self._until = State.PAUSING, self._clock.monotonic() + pause

    def _cannot_restart(self, death: Death, end: End) -> str:
        if end.repair == "end":
            return "no restart would mend it" if end.errors else end.how
        if not self._config.elastic:
            return "the job is not elastic, so it ends with any of its processes"
        if self._reports.has_supervisor and end.repair == "job":
            return "the ranks have not come together, so the whole job is to start again"
        return self._record.died(death, end)

    def _report_death(
        self,
        death: Death,
        end: End,
        notes: dict[str, Any],
        follows: str,
        *,
        final: bool = False,
        again: bool = False,
        ended: bool = False,
        round: int | None = None,
    ) -> None:
        """Report a death; with a round, the supervisor decides what follows, and says so."""
        kind, reading = ends.fault(death), death.reading
        # the full text is printed elsewhere
        words = death.kinds[0] if end.errors else ends.brief(death.words)
        commit = f" after its commit {reading.commit}" if reading.commit else " before its first commit"
        commit = "" if round is not None and not reading.commit else commit
        what = f"{kind.replace('_', ' ')} ({words}){commit}"
        quiet = round is not None or (end == FIRST_ERROR and self._reports.is_supervised)
        facts: dict[str, Any] = {
            "message": f"{self._reports.name(reading)}: {what}{follows and '; '}{follows}",
            "fault": kind,
            "slot": self._config.local_rank,
            "exit": death.returncode,
            "commit": [reading.generation, reading.commit],
            "steps": reading.steps,
            "silent": self._hung or 0.0,
            "detail": death.words[:_LONGEST_DETAIL] + (", while other ranks still trained" if ended else ""),
            "identity": death.cause.error,
            "end": end.name,
            "point": reading.point,
            "traceback": str(notes.get("traceback", "")),
            "final": final,
            "again": again,
            "heard": "StoppedError" in death.kinds,
            "round": round,
            "begun": reading.phase != Phase.UNKNOWN,
            "age": self._clock.monotonic() - self._began,
            "loaded": None if reading.changed > reading.agreed else notes.get("loaded") or None,
            "root": self._record.root,
        }
        if ended:
            self._reports.send(kind="done", stops=self._stop_by is not None, **facts)
        else:
            level = logging.DEBUG if quiet else logging.WARNING
            self._reports.report("fault", rank=reading.rank, level=level, **facts)

    def _note(self, reading: Reading) -> None:
        """Note how far the training has come, and forward the events of the process."""
        self._record.note(reading)
        self._reports.forward(self._training)
        while self._divergences < reading.diverged:  # the parameters here were not those of most ranks
            self._divergences += 1
            self._reports.send(kind="diverged")

    def _end_hang(self, reading: Reading) -> None:
        """Save the stacks of a hanging process, and kill it."""
        if reading.phase == Phase.READY:  # this does not count as a death of the training process
            logger.warning(
                "the standby on %s was woken, but has not begun to run its program for %.0f s; starting a "
                "new process",
                self._config.host,
                reading.silent,
            )
            self._state, self._until = State.PAUSING, self._clock.monotonic()
            return
        self._hung = reading.silent
        stopped = processes.is_stopped(self._training.pid)
        where = self._whereabouts.take(self._training, reading) or ("stopped" if stopped else "and no answer")
        trains = reading.phase in (Phase.BEGINNING, Phase.TRAINING)
        advice = " (work that takes longer belongs in recover.paused())" if trains else ""
        message = "%s: no progress for %.1f s, %s; killing it%s"
        logger.error(message, self._reports.name(reading), reading.silent, where, advice)
        self._kill()

    # -- processes -------------------------------------------------------------------------------------

    def _start(self, *, rejoins: bool = False) -> Training:
        try:
            more = python_command.early_environment(self._command, self._environ)
            environ = {**self._environ, **more, **self._record.handed_down}
            return Training(self._command, environ, rejoins=rejoins)
        except OSError as error:
            raise LaunchError(self._command[0], f"can't be started: {error.strerror}") from error

    def _kill(self) -> None:
        """SIGKILL the training process."""
        if self._training.returncode is None and not self._training.kill():
            self._reports.events.emit("unkillable", processes=[self._training.pid])

    def _end(self, how: str, code: int) -> int:
        """Tell the supervisor how this slot ended; return the exit code."""
        self._record.note_root(self._training.notes())
        self._reports.end(how, self._training.read(), self._record.root)
        return code


def guard(command: Sequence[str], settings: Settings, config: Config) -> int:
    """Watch over a training command, as ``hvdrecover worker`` does; return the exit code."""
    environ = environment()
    return Guardian(command, {**open_mpi(environ), **environ}, settings, config).run()
