"""A drill: one undisturbed run of a script, and runs with faults that are compared with it."""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from hvdrecover.config import LEAST_TIMEOUT, PREEMPTED
from hvdrecover.drill import check
from hvdrecover.drill.check import Comparison, Finding
from hvdrecover.drill.faults import FAULTS, complete
from hvdrecover.drill.lab import Lab
from hvdrecover.drill.records import Agreed, Records
from hvdrecover.drill.run import PATIENCE, Command, ScriptRun
from hvdrecover.drill.schedule import Schedule, Strike, spread
from hvdrecover.drill.verdict import Outcome, Result, Struck
from hvdrecover.errors import DrillError
from hvdrecover.launch.hangs import FACTOR

logger = logging.getLogger(__name__)

_MOST_RUNS = 3  # for each planned run: a run may end before any of its faults could strike
_HANG_TIMEOUT = "--hang-timeout"
# Ranks wait half of it for ranks on other hosts; a replacement must have started by then.
_LEAST_ON_HOSTS = 20.0  # seconds
_PAUSE = 30.0  # seconds to wait for a durable commit after a fault of the storage
_FEW = 2  # commits during which a lasting fault strikes, and during which training continues after it
_LOOK = 0.1  # seconds


class Drill:
    """A drill.

    Args:
        folder: takes all files.
        command: how the script is started.
        duration: seconds after which a run is ended; None lets it come to its end.
        lab: the hosts for all runs; by default they are on this host.

    Attributes:
        clean: the lines of the undisturbed run.
    """

    def __init__(
        self, folder: Path, command: Command, *, duration: float | None = None, lab: Lab | None = None
    ) -> None:
        self._folder = folder
        self._command = command
        self._duration = duration
        self._lab = lab
        self._notes: list[Finding] = []
        self.clean = Records()
        self._code = 0  # of the undisturbed run

    def rehearse(self) -> int:
        """Run the script undisturbed, and return the number of its commits.

        Raises:
            DrillError: it fails, makes no commits, or should have virtual ranks and has none.
        """
        run = ScriptRun(self._folder / "clean", self._command, self._lab)
        try:
            run.start()
            deadline = time.monotonic() + (self._duration or math.inf)
            while run.job.running and time.monotonic() < deadline:
                run.follow_to(run.newest + 1)
            run.leave()
        finally:
            run.kill()
        self.clean, self._code = run.records(), run.codes[-1]
        if self._code not in (0, PREEMPTED):
            raise run.failure(f"the script fails even undisturbed, with exit code {self._code}")
        if not self.clean.newest:
            problem = "nothing can be recovered: call state.commit() in its training loop"
            raise DrillError("the script", f"it makes no commits, so {problem}")
        if self._command.resizes and not self.clean.virtual:
            remedy = "make its state with virtual_ranks=, or leave out --resize"
            raise DrillError("the script", f"its result depends on the number of ranks: {remedy}")
        if _HANG_TIMEOUT not in self._command.options:
            least = LEAST_TIMEOUT if self._lab is None else _LEAST_ON_HOSTS
            seconds = max(least, math.ceil(FACTOR * _longest_silence(self.clean)))
            options = (*self._command.options, _HANG_TIMEOUT, f"{seconds:g}")
            self._command = replace(self._command, options=options)
        return self.clean.newest

    @property
    def seconds_per_commit(self) -> float:
        """The mean of the undisturbed run."""
        commits = self.clean.commits
        return (commits[-1].time - commits[0].time) / max(1, self.clean.newest - 1)

    def strike(self, schedule: Schedule, skipped: Mapping[str, str]) -> Outcome:
        """Run the script with the faults of a schedule, which is stored before anything strikes."""
        results: list[Result] = []
        most = _MOST_RUNS * len(schedule.runs)
        schedule.store(self._folder / "schedule.json")
        for number, strikes in enumerate(schedule.runs, 1):
            _announce(number, strikes)
        while len(results) < len(schedule.runs):
            results.append(result := self._run(len(results) + 1, schedule.runs[len(results)]))
            if result.missed and not result.findings and len(schedule.runs) < most:
                again = spread(result.missed, self.clean.newest)
                schedule = replace(schedule, runs=(*schedule.runs, again))
                _announce(len(schedule.runs), again)
        schedule.store(self._folder / "schedule.json")
        return Outcome(self._folder, schedule, results, skipped, self._notes[:1])

    def _run(self, number: int, strikes: Sequence[Strike]) -> Result:
        """Run the script with faults, and compare it with the undisturbed run."""
        run = ScriptRun(self._folder / f"faults-{number}", self._command, self._lab)
        shutil.copytree(self._folder / "clean" / "initial", run.root)  # the same initial state
        result = Result(run.folder)
        left: list[int] = []
        mapped: set[int] = set()  # inodes of the files in shared memory that its processes had mapped
        try:
            for strike in strikes:
                run.options += [word for word in FAULTS[strike.fault].options(run) if word not in run.options]
            run.start()
            for strike in strikes:
                self._strike(run, strike, result)
                for process in run.job.processes():
                    mapped |= check.shared_memory(process)
            run.follow_to(self.clean.newest)
            if self._duration is None:
                run.wait(PATIENCE)
            else:
                run.leave()
            left = run.job.processes()
        except DrillError as error:
            message = str(error)
            if result.struck:
                fault = FAULTS[result.struck[-1].strike.fault]
                message = f"after '{fault.name}', where {fault.expected}: {message}"
            result.findings.append(Finding(check.TRAINS_AGAIN, message))
        finally:
            run.kill()
            for struck in result.struck:  # the next run uses the same hosts
                if end := FAULTS[struck.strike.fault].end:
                    end(run)
        if not result.findings:
            result.findings = check.machine(run, left, mapped, self._code)
        self._compare(run.records(), result)
        result.codes = run.codes
        return result

    def _compare(self, faulty: Records, result: Result) -> None:
        comparison = Comparison(self.clean, faulty)
        result.findings += comparison.findings
        result.rank_local = comparison.rank_local
        result.compared, result.not_compared = comparison.compared, comparison.not_compared
        result.samples_miscounted = comparison.samples_miscounted
        result.steps_repeated = faulty.steps_repeated
        self._notes += [comparison.note] if comparison.note else []

    def _strike(self, run: ScriptRun, strike: Strike, result: Result) -> None:
        """Have a fault strike a run, and wait until training has continued for a few commits."""
        fault = FAULTS[strike.fault]
        run.follow_to(strike.commit)
        due = run.wait_until(lambda records: records.train_since(0.0) and run.hosts_are_well())
        if not due or run.newest > self.clean.newest - _FEW:
            result.missed.append(strike)
            return
        logger.info("drill: %s: %s at commit %d", run.folder.name, strike.fault, run.newest)
        ranks = list(run.ranks())
        begun, struck = time.monotonic(), Struck(strike, run.newest)
        result.struck.append(struck)
        fault.strike(run, ranks[strike.rank % len(ranks)])
        if fault.end is None:
            trains = run.wait_until(lambda records: records.train_since(begun))
        else:
            trains = _wait_for_commits(run)
            durable = complete(run)
            fault.end(run)
            # A failed write is tried again after a pause.
            deadline = time.monotonic() + _PAUSE
            while run.job.running and complete(run) == durable and time.monotonic() < deadline:
                time.sleep(_LOOK)
        if not trains and run.newest < self.clean.newest:
            raise run.failure("the job ended")
        struck.recovered = True  # also if it made its last commits before it noticed the fault
        again = run.records().stepped_since(begun)
        struck.seconds = None if again is None else again - begun
        if trains:
            _wait_for_commits(run)


def _wait_for_commits(run: ScriptRun) -> bool:
    """Wait for a few commits; False if the run ended before."""
    before = run.newest
    return run.wait_until(lambda records: run.newest >= before + _FEW and records.train_since(0.0))


def _announce(number: int, strikes: Sequence[Strike]) -> None:
    logger.info("drill: faults-%d is to have %s", number, ", ".join(map(str, strikes)))


def _longest_silence(records: Records) -> float:
    """Return the longest time in seconds between two lines of one rank, in an undisturbed run."""
    times: dict[int, list[float]] = {}
    for line in records.lines:
        if not isinstance(line, Agreed):
            times.setdefault(line.rank, []).append(line.time)
    return max((later - earlier for each in times.values() for earlier, later in pairwise(each)), default=0.0)
