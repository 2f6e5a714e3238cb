"""The guardian of one slot: starts its training process, watches it, and restarts it in place.

1. Start the training process. Its page (`hvdrecover.heartbeat`) says in which phase it is, and how far.
2. Look at it five times a second (`SlotState.WATCHING`). Kill it if it makes no progress for longer than
   `waits.hang_limit` allows. In calm training, start a standby beside it.
3. When it ends, find out how (`ends.end_of`). It may have finished or left: then the guardian ends, too.
4. Else repair it: after a pause (`SlotState.PAUSING`, none at the first death), wake the standby, or start
   a new process. Horovod's driver never learns of the death, so it blacklists nothing.
5. After too many deaths without progress, or an error that a restart cannot mend, give the slot up. If the
   supervisor has to end the job, wait for that (`SlotState.DISMISSED`): Horovod ends all ranks as soon as one
   guardian exits, and the other ranks must report their errors first.

A process outside a function decorated by `run` does not survive the loss of other ranks, so steps 3 to 5
are others there: the guardian reports its end, and waits (`SlotState.DISMISSED`). The supervisor has all
guardians of the job start their processes again together, or end (`ends.together`).

At any time: a stop signal or the supervisor's order asks the process to leave at its next commit; when the
grace is over, it is killed. If the supervisor is gone, the guardian kills it, too, and ends.
"""

from __future__ import annotations

import logging
import math
import re
import selectors
import signal
import textwrap
from collections import deque
from collections.abc import Mapping, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import Any

from hvdrecover.config import PREEMPTED, Config, environment, open_mpi
from hvdrecover.errors import ConfigError, LaunchError
from hvdrecover.events import Events, number
from hvdrecover.heartbeat import Phase, Reading, Stop
from hvdrecover.launch import ends, link, processes, slurm, waits
from hvdrecover.launch.ends import FIRST_ERROR, Death, End, Record
from hvdrecover.launch.link import Message
from hvdrecover.launch.processes import Waking
from hvdrecover.launch.training import Readiness, Training, early_environment, parse
from hvdrecover.machine import SYSTEM_CLOCK, Bounded, Clock
from hvdrecover.texts import is_library

logger = logging.getLogger(__name__)

_REPORT = 5.0  # seconds between reports of the last commit to the supervisor
_SUSPENDED = 5.0  # seconds between looks after which this process, too, must have been stopped
_LONGEST_WORDS = 200  # characters of an error in a line; it is printed in full elsewhere
_LONGEST_DETAIL = 10_000  # characters of an error in an event; the traceback has all of it
_MOST_UNSENT = 10_000  # events that wait while the supervisor reads none; beyond it, the oldest are dropped
_LISTED = 3  # tensors that a message lists
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_THREADS = re.compile(r"^(?=(?:Current thread|Thread) )", re.MULTILINE)


class SlotState(Enum):
    WATCHING = auto()  # the training process runs, or has just ended
    PAUSING = auto()  # it has ended, and is started again when the pause is over
    DISMISSED = auto()  # the process has ended; the supervisor decides about the job, or ends it


class Guardian:
    def __init__(
        self, command: Sequence[str], environ: dict[str, str], config: Config, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._command = list(command)
        self._environ = environ
        self._config = config
        self._clock = clock
        if config.supervisor is None:
            problem = "is not set; `hvdrecover run` sets it and starts workers"
            raise ConfigError("HVDRECOVER_SUPERVISOR", problem)
        self._supervisor = link.connect(*config.supervisor, name=config.host, slot=config.local_rank)
        self._unsent: deque[tuple[float, Mapping[str, Any]]] = deque(maxlen=_MOST_UNSENT)
        self._events = Events(self._add_event, config.host, clock)
        self._disk = Bounded(waits.DISK)
        self._record = Record()
        program = parse(command)
        self._wrapped = program is None  # the exit code may be a shell's
        self._readiness = Readiness(program if config.elastic and not config.no_standby else None, environ)
        self._training: Training
        self._state, self._until = SlotState.WATCHING, 0.0  # until when a state other than WATCHING lasts
        self._how, self._code = "", 0  # how the slot ends when the supervisor dismisses it
        self._hung: float | None = None  # seconds without progress for which the process was killed
        self._stop_by: float | None = None  # when a process that was asked to leave is killed
        self._signals: list[int] = []
        self._orders: list[Message] = []  # of the supervisor, that wait to be followed
        self._signalled = self._handed_on = False
        self._divergences = 0
        self._stall: tuple[int, int, list[int]] | None = None  # the last one that was reported
        self._told = (False, False)  # last report to the supervisor: process has begun, is in `run`
        self._began = self._ticked = self._reported = clock.monotonic()
        self._memory_kills = processes.memory_kills()

    def run(self) -> int:
        """Keep the slot running until it is done or given up; return the exit code, 75 after a preemption."""
        processes.die_with_parent(signal.SIGHUP)  # handled here, even if nohup ignores it
        heeded = (*self._config.stop_signals, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
        with Waking((*heeded, signal.SIGCHLD)) as waking:
            waking.selector.register(self._supervisor, selectors.EVENT_READ, self._receive_orders)
            self._await_facts(waking)
            try:
                self._training = self._start()
            except LaunchError as error:
                # A job that has trained does without this host. Else the command is wrong, and the job ends.
                trained = self._record.committed
                end, fault = ("crash", "crash") if trained else (FIRST_ERROR.name, "script_error")
                facts: dict[str, Any] = {"end": end, "fault": fault, "point": (0, 0), "commit": (0, 0)}
                facts |= {"message": f"{self._config.host}: {error}", "detail": str(error)}
                self._supervisor.send(kind="fault", exit=1, final=True, unprinted=False, **facts)
                return 1
            try:
                code = None
                while code is None:
                    self._signals += waking.wait(waits.LOOK)
                    code = self._look()
                return code
            finally:
                self._training.kill()
                self._forward_events()
                self._training.close()
                self._readiness.drop()

    def _look(self) -> int | None:
        """Act on orders, signals, a lost supervisor and the state; return the exit code at the end."""
        while self._orders:
            self._follow(self._orders.pop(0))
        while self._signals:
            if (code := self._handle_signal(self._signals.pop(0))) is not None:
                return code
        if not self._supervisor.is_open:
            self._kill()
            if self._config.is_first_of_host:
                slurm.leave_heir(self._environ, self._config.host)
            return processes.exit_code(-signal.SIGHUP)
        match self._state:
            case SlotState.WATCHING:
                return self._watch()
            case SlotState.PAUSING:
                return self._pause()
            case SlotState.DISMISSED if self._clock.monotonic() > self._until:
                return self._end(self._how, self._code) if self._how else self._code
        return None

    # -- the states ------------------------------------------------------------------------------------

    def _watch(self) -> int | None:
        if self._training.returncode is not None:
            return self._died(self._training.returncode)
        now = self._clock.monotonic()
        page, reading = self._training.page, self._training.read()
        if now - self._ticked > _SUSPENDED:  # this host was suspended: no process could report progress
            page.touch()
        self._ticked = now
        self._note(reading)
        self._report_stall(reading)
        page.allow_stalls(*waits.stalls(reading, self._config))
        if self._stop_by is not None and now > self._stop_by:
            name = self._name(reading)
            logger.warning("the grace is over: %s stops; its last durable commit stands", name)
            self._kill()
        elif reading.silent > waits.hang_limit(reading, self._config, joins=self._record.joined):
            self._end_hang(reading)
        elif self._stop_by is not None:
            # a script that has no commits to leave at
            if reading.phase in (Phase.UNKNOWN, Phase.PLAIN) and not self._handed_on:
                self._handed_on = True
                self._training.process.terminate()
        else:
            self._readiness.keep(self._training, reading, now)
        if (ready := self._readiness.news()) is not None:
            self._events.emit("standby", slot=self._config.local_rank, ready=ready)
        self._report_progress(reading, now)
        return None

    def _report_progress(self, reading: Reading, now: float) -> None:
        told = reading.phase != Phase.UNKNOWN, reading.in_run
        if now - self._reported > _REPORT or told != self._told:
            self._began = now if told[0] and not self._told[0] else self._began
            self._reported, self._told = now, told
            commit, farthest = (reading.generation, reading.commit), self._record.farthest
            facts = {"commit": commit, "point": farthest, "root": self._root(self._training.notes())}
            self._supervisor.send(kind="commit", begun=told[0], in_run=told[1], **facts)

    def _pause(self) -> int | None:
        if self._stop_by is not None:
            return self._end("stopped", PREEMPTED)
        if self._clock.monotonic() < self._until:
            return None
        before = self._training.read()
        self._note(before)
        self._root(self._training.notes())  # the next process must not take an unmounted root for a new one
        self._training.close()
        self._divergences = 0
        woken = self._readiness.wake(self._record.handed_down)
        self._training = woken or self._start(rejoins=True)
        self._training.page.has_seen(before.longest)
        self._ticked, self._state = self._clock.monotonic(), SlotState.WATCHING
        attempt = self._record.deaths + self._record.rounds
        self._events.emit("restart", scope="slot", warm=woken is not None, attempt=attempt)
        return None

    # -- signals and orders ----------------------------------------------------------------------------

    def _handle_signal(self, number: int) -> int | None:
        if number == signal.SIGQUIT:
            self._show_place()
        elif number in self._config.stop_signals and not self._signalled:
            # may come together with the supervisor's order: a batch system signals all processes
            self._signalled = True
            if self._stop_by is None:
                self._ask(Stop.HOST, self._config.grace)
        elif number != signal.SIGCHLD:
            self._kill()
            return self._end("stopped", processes.exit_code(-number))
        return None

    def _ask(self, stop: Stop, grace: float) -> None:
        self._stop_by = self._clock.monotonic() + grace
        self._training.page.ask(stop)

    def _receive_orders(self) -> None:
        self._orders += self._supervisor.receive()

    def _await_facts(self, waking: Waking) -> None:
        """Wait for the supervisor's first message, which the first process of a slot needs, too."""
        # Horovod's driver may start a slot again in the middle of a job. Without the facts, the process would
        # take a root that is not mounted for a new one.
        until = self._clock.monotonic() + waits.MESSAGE
        while not self._orders and self._supervisor.is_open and (left := until - self._clock.monotonic()) > 0:
            self._signals += waking.wait(left)
        if self._orders:
            self._follow(self._orders.pop(0))

    def _follow(self, order: Message) -> None:
        match order["order"]:
            case "leave":
                self._ask(Stop.JOB, order["grace"])
            case "stop":
                self._signals.append(signal.SIGHUP)
            case "stacks":
                self._show_place(order.get("ranks"))
            case "know":
                self._record.learn(order)
            case "restart":
                self._start_again(order["pause"])
            case "exit":
                self._until = 0.0

    # -- the end of a training process -----------------------------------------------------------------

    def _died(self, returncode: int) -> int | None:
        """Restart the training process in place, or return the code to exit with."""
        kills, before = processes.memory_kills(), self._memory_kills
        self._memory_kills = kills
        notes, reading = self._training.notes(), self._training.read()
        death = Death(
            processes.returncode_of(returncode) if self._wrapped else returncode,
            reading,
            notes,
            hung=self._hung is not None,
            out_of_memory=kills > before,
            lost="" if self._record.in_run or reading.in_run else str(notes.get("lost", "")),
        )
        self._note(reading)  # before the fault, in the order in which things happened
        self._root(notes)
        end, stops = ends.end_of(death, first=not self._record.committed), self._stop_by is not None
        if self._config.elastic and not self._record.in_run and reading.phase != Phase.FINISHED:
            if stops and end.name != "left":
                self._await_all(death, end, "stopped", PREEMPTED)
                return None
            if end.repair == "in place" or end.name in ("untrained", "dismissed", FIRST_ERROR.name):
                self._await_all(death, end, "untrained", 0)
                return None
        if end.code == 0:
            return self._end(end.name, 0)
        if stops or end.name == "left":
            whole = notes.get("left") == "job"
            how = "preempted" if whole else "left" if end.name == "left" else "stopped"
            return self._end(how, PREEMPTED)
        if end.repair == "none":
            return self._end("stopped", processes.exit_code(death.returncode))
        return self._repair(death, end)

    def _repair(self, death: Death, end: End) -> int | None:
        """Decide whether the process is restarted, report its death, and enter the next state."""
        if end.repair == "end":
            reason = "no restart would mend it" if end.errors else end.how
        elif not self._config.elastic:
            reason = "the job is not elastic, so it ends with any of its processes"
        elif end.repair == "job":
            reason = "the ranks have not come together, so the whole job is to start again"
        else:
            reason = self._record.died(death)
        pause = ends.pause(self._record.deaths)
        by = "by its standby" if self._readiness.is_warm else "in place"
        follows = f"given up: {reason}" if reason else f"restarted {by}{f' in {pause:g} s' if pause else ''}"
        self._report_death(death, end, f"; {follows}", final=bool(reason))
        now = self._clock.monotonic()
        if not reason:
            self._state, self._until = SlotState.PAUSING, now + pause
            return self._pause()
        self._events.emit("gave_up", scope="slot", reason=reason)
        self._code = end.code or processes.exit_code(death.returncode) or 1
        self._state, self._until = SlotState.DISMISSED, now + waits.DISMISSAL
        return None if end.repair == "end" else self._code  # the supervisor is to end the job

    def _await_all(self, death: Death, end: End, how: str, code: int) -> None:
        """Report the end of a process outside `run`, and wait: all ranks start again, or end, together."""
        stops = self._stop_by is not None
        ended = stops or (death.returncode == 0 and not death.error)
        kind = "done" if ended else "fault"
        self._report_death(death, end, "", kind=kind, round=self._record.rounds, stops=stops)
        self._how, self._code = how, code
        self._state, self._until = SlotState.DISMISSED, math.inf

    def _start_again(self, pause: float) -> None:
        if self._stop_by is not None:
            return
        self._kill()
        self._record.rounds += 1
        self._how, self._hung = "", None
        self._state, self._until = SlotState.PAUSING, self._clock.monotonic() + pause

    def _report_death(
        self, death: Death, end: End, follows: str, *, kind: str = "fault", **more: Any
    ) -> None:
        """Report a death to the supervisor, which prints it; with a round, it decides what follows."""
        fault, reading = ends.fault_of(death), death.reading
        name, ended = self._name(reading), kind == "done"
        words = textwrap.shorten(death.words, _LONGEST_WORDS, placeholder="…")
        words = death.kinds[0] if end.errors else words
        after = f" after its commit {reading.commit}" if reading.commit else ""
        after = after or ("" if "round" in more else " before its first commit")
        message = f"{name}: {fault.replace('_', ' ')} ({words}){after}{follows}"
        facts: dict[str, Any] = {
            "fault": fault,
            "slot": self._config.local_rank,
            "exit": death.returncode,
            "commit": (reading.generation, reading.commit),
            "steps": reading.steps,
            "silent": self._hung or 0.0,
            "detail": death.words[:_LONGEST_DETAIL] + (", while other ranks still trained" if ended else ""),
        }
        self._supervisor.send(
            kind=kind,
            message=message,
            name=name,
            identity=death.identity,
            end=end.name,
            point=reading.point,
            traceback=str(death.notes.get("traceback", "")),
            unprinted=bool(death.notes.get("unprinted")),
            heard="StoppedError" in death.kinds,
            begun=reading.phase != Phase.UNKNOWN,
            age=self._clock.monotonic() - self._began,
            loaded=None if reading.changed > reading.agreed else death.notes.get("loaded"),
            root=self._record.root,
            **{"round": None, **facts, **more},
        )
        if not ended:
            self._events.rank = reading.rank
            self._events.emit("fault", **facts)
        self._hung = None

    def _note(self, reading: Reading) -> None:
        """Note how far the training has come, and forward the events of the process."""
        self._record.note(reading)
        self._forward_events()
        while self._divergences < reading.diverged:  # the parameters here were not those of most ranks
            self._divergences += 1
            self._supervisor.send(kind="diverged")

    def _end_hang(self, reading: Reading) -> None:
        if reading.phase == Phase.READY:  # this does not count as a death of the training process
            problem = f"has not begun to run its program for {reading.silent:.0f} s; starting a new process"
            logger.warning("the standby on %s was woken, but %s", self._config.host, problem)
            self._state, self._until = SlotState.PAUSING, self._clock.monotonic()
            return
        self._hung = reading.silent
        answer = "stopped" if processes.is_stopped(self._training.pid) else "and no answer"
        where = self._take_stacks(reading) or answer
        trains = reading.phase in (Phase.BEGINNING, Phase.TRAINING)
        advice = " (work that takes longer belongs in recover.paused())" if trains else ""
        message = "%s: no progress for %.1f s, %s; killing it%s"
        logger.error(message, self._name(reading), reading.silent, where, advice)
        self._kill()

    # -- processes -------------------------------------------------------------------------------------

    def _start(self, *, rejoins: bool = False) -> Training:
        try:
            more = early_environment(self._command, self._environ)
            environ = {**self._environ, **more, **self._record.handed_down}
            return Training(self._command, environ, rejoins=rejoins)
        except OSError as error:
            raise LaunchError(self._command[0], f"can't be started: {error.strerror}") from error

    def _kill(self) -> None:
        if self._training.returncode is None and not self._training.kill():
            self._events.emit("unkillable", processes=[self._training.pid])

    def _root(self, notes: Mapping[str, Any]) -> str:
        """Return the checkpoint root on which the training process has agreed with the others, or ''."""
        self._record.root = str(notes.get("root", self._record.root))
        return self._record.root

    def _end(self, how: str, code: int) -> int:
        """Tell the supervisor how this slot ended: finished, untrained, preempted, left or stopped."""
        reading, notes = self._training.read(), self._training.notes()
        commit = (reading.generation, reading.commit)
        traceback = notes["traceback"] if notes.get("unprinted") and self._state is SlotState.WATCHING else ""
        self._supervisor.send(kind="end", how=how, commit=commit, root=self._root(notes), traceback=traceback)
        return code

    # -- reports to the supervisor ---------------------------------------------------------------------

    def _add_event(self, event: Mapping[str, Any]) -> None:
        self._unsent.append((self._clock.monotonic(), event))
        self._send_events()

    def _forward_events(self) -> None:
        for event in self._training.events():
            self._unsent.append((number(event.pop("emitted", None)) or 0.0, event))
        self._send_events()

    def _send_events(self) -> None:
        while self._unsent and self._supervisor.is_open and self._supervisor.has_room:
            emitted, event = self._unsent.popleft()
            age = max(self._clock.monotonic() - emitted, 0.0)
            self._supervisor.send(kind="event", age=age, event=event)

    def _name(self, reading: Reading) -> str:
        slot = f"the process of slot {self._config.local_rank}"
        return f"{f'rank {reading.rank}' if reading.rank >= 0 else slot} on {self._config.host}"

    def _report(self, kind: str, message: str, rank: int, **facts: Any) -> None:
        self._events.rank = rank
        self._events.emit(kind, message, level=logging.WARNING, **facts)

    def _report_stall(self, reading: Reading) -> None:
        """Report, once per commit, which tensors wait for which ranks, so these ranks show their stacks."""
        missing = self._training.stalled()
        stall = (reading.generation, reading.commit, sorted(missing))
        # All ranks are in `recover.paused()` together, so the missing ones may be at long work there.
        if missing and stall != self._stall and not (reading.paused or reading.waiting):
            self._stall = stall
            message = stall_in_words(missing, reading.silent)
            self._report("stalled", message, reading.rank, seconds=reading.silent, missing=missing)
            self._supervisor.send(kind="stalled", ranks=list(missing))

    def _show_place(self, ranks: Sequence[int] | None = None) -> None:
        """Report the place of the training process, if it is one of these ranks."""
        reading = self._training.read()
        if (ranks is None or reading.rank in ranks) and not self._take_stacks(reading):
            reason = "it has ended, is stopped, or has not imported hvdrecover yet"
            logger.warning("%s does not say where it is: %s", self._name(reading), reason)

    def _take_stacks(self, reading: Reading) -> str:
        """Save the stacks of the training process; return its place in words, or '' if it does not answer."""
        silent = reading.phase == Phase.UNKNOWN or self._training.returncode is not None
        if silent or not (text := self._training.stacks()):
            return ""
        assert self._config.events is not None  # the supervisor sets it
        file = self._config.events / f"stacks-{self._config.host}-{self._training.pid}.txt"
        where, saved = place_in(text), None
        try:
            self._disk(_append, file, text)
            saved = str(file)
        except OSError as error:
            logger.warning("stacks: %s", error)
        message = f"{self._name(reading)} is at {where}"
        self._report("stacks", message, reading.rank, summary=where, file=saved)
        return f"at {where}" if where else ""


def _append(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)  # no deadline: callers bound it
    with file.open("a") as output:  # no deadline: callers bound it
        output.write(text)  # no deadline: callers bound it


def stall_in_words(missing: Mapping[int, Sequence[str]], seconds: float) -> str:
    parts = []
    for rank, names in sorted(missing.items()):
        shown, hidden = ", ".join(names[:_LISTED]), len(names) - _LISTED
        more = f" and {hidden} more" if hidden > 0 else ""
        have = "has" if len(names) == 1 else "have"
        parts.append(f"{shown}{more} {have} waited {seconds:.0f} s for rank {rank}")
    return "; ".join(parts)


def place_in(stacks: str) -> str:
    """Return the main thread's innermost frame, the user's own if possible, as ``file:line in f``, or ''."""
    main = next((each for each in _THREADS.split(stacks) if each.startswith("Current thread")), stacks)
    frames = list(_FRAME.finditer(main))
    if not frames:
        return ""
    frame = next((each for each in frames if not is_library(each["file"])), frames[0])
    return f"{frame['file']}:{frame['line']} in {frame['function']}"


def guard(command: Sequence[str], config: Config) -> int:
    environ = environment()
    return Guardian(command, {**open_mpi(environ), **environ}, config).run()
