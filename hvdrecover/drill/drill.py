"""A drill: one undisturbed run of a script, and runs with faults that are compared with it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from hvdrecover.config import PREEMPTED
from hvdrecover.drill import check
from hvdrecover.drill.check import Finding
from hvdrecover.drill.faults import FAULTS, Fault, complete
from hvdrecover.drill.lab import Lab
from hvdrecover.drill.records import Records
from hvdrecover.drill.schedule import Schedule, Strike, again, described
from hvdrecover.drill.script_run import Command, ScriptRun
from hvdrecover.drill.verdict import Outcome, Result, Struck
from hvdrecover.errors import DrillError
from hvdrecover.launch.hangs import FACTOR, LEAST_TIMEOUT

logger = logging.getLogger(__name__)

_PATIENCE = 300.0  # seconds without any progress until a run counts as stuck
_IN_VAIN = 2  # how often a run is repeated that ended before any of its faults could strike
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
    """

    def __init__(
        self, folder: Path, command: Command, *, duration: float | None = None, lab: Lab | None = None
    ) -> None:
        self._folder = folder
        self._command = command
        self._duration = duration
        self._lab = lab
        self._rehearsed: ScriptRun | None = None
        self._notes: list[Finding] = []

    def rehearse(self) -> int:
        """Run the script undisturbed, and return the number of its commits.

        Raises:
            DrillError: it fails, makes no commits, or should have virtual ranks and has none.
        """
        run = self._rehearsed = ScriptRun(self._folder / "clean", self._command, self._lab)
        try:
            run.start()
            deadline = time.monotonic() + (self._duration or math.inf)
            while run.running and time.monotonic() < deadline:
                run.follow(_PATIENCE)
            run.leave()
        finally:
            run.kill()
        records = run.records()
        if run.codes[-1] not in (0, PREEMPTED):
            raise run.failure(f"the script fails even undisturbed, with exit code {run.codes[-1]}")
        if not records.newest:
            problem = (
                "it makes no commits, so nothing can be recovered: call state.commit() in its training loop"
            )
            raise DrillError("the script", problem)
        if self._command.resizes and not records.virtual:
            problem = (
                "its result depends on the number of ranks: make its state with virtual_ranks=, or leave out"
            )
            raise DrillError("the script", f"{problem} --resize")
        if _HANG_TIMEOUT not in self._command.options:
            least = LEAST_TIMEOUT if self._lab is None else _LEAST_ON_HOSTS
            seconds = max(least, math.ceil(FACTOR * _longest_silence(records)))
            options = (*self._command.options, _HANG_TIMEOUT, f"{seconds:g}")
            self._command = replace(self._command, options=options)
        return records.newest

    @property
    def _clean(self) -> ScriptRun:
        """The undisturbed run."""
        assert self._rehearsed is not None
        return self._rehearsed

    @property
    def seconds_per_commit(self) -> float:
        """The mean of the undisturbed run."""
        records = self._clean.records()
        times = [line.time for line in records.commits]
        return (times[-1] - times[0]) / max(1, records.newest - 1)

    def available(self, faults: Sequence[Fault]) -> tuple[list[Fault], dict[str, str]]:
        """Return the faults that can strike here, and the unmet needs of the others."""
        lacking = {fault.name: why for fault in faults if (why := fault.lacks(self._command, self._lab))}
        return [fault for fault in faults if fault.name not in lacking], lacking

    def strike(self, schedule: Schedule, skipped: Mapping[str, str]) -> Outcome:
        """Run the script with the faults of a schedule, which is stored before anything strikes.

        Faults for which a run ended too early strike in one more run.

        Args:
            schedule: the faults.
            skipped: for each fault that cannot strike, what it needs.
        """
        results: list[Result] = []
        runs = list(schedule.runs)
        in_vain = [0] * len(
            runs
        )  # for each run, how many runs before it ended before these faults could strike
        self._store(schedule)
        for number, strikes in enumerate(runs, 1):
            self._announce(number, strikes)
        while len(results) < len(runs):
            place = len(results)
            results.append(result := self._run(place + 1, runs[place]))
            vain = 0 if result.struck else in_vain[place] + 1
            if result.missed and vain <= _IN_VAIN and not result.findings:
                runs.append(again(result.missed, self._clean.records().newest))
                in_vain.append(vain)
                self._announce(len(runs), runs[-1])
        schedule = replace(schedule, runs=tuple(runs))
        self._store(schedule)
        return Outcome(self._folder, schedule, results, skipped, self._notes[:1])

    def _store(self, schedule: Schedule) -> None:
        (self._folder / "schedule.json").write_text(schedule.dumps())

    def _announce(self, number: int, strikes: Sequence[Strike]) -> None:
        logger.info("drill: faults-%d is to have %s", number, described(strikes, self._command.processes))

    def _run(self, number: int, strikes: Sequence[Strike]) -> Result:
        run = ScriptRun(self._folder / f"faults-{number}", self._command, self._lab)
        run.begin_like(self._clean)
        clean = self._clean.records()
        disturbed = _Disturbed(run, strikes, clean.newest)
        left: list[int] = []
        try:
            disturbed.go_through(to_its_end=self._duration is None)
            left = [] if run.running else run.job.processes()
        finally:
            run.kill()
            disturbed.end_faults()  # the next run uses the same hosts
        result = disturbed.result
        if not result.findings:
            result.findings = check.machine(run, left, disturbed.mapped, self._clean.codes[-1])
        records = run.records()
        result.findings += check.script(clean, records)
        result.rank_local, note = check.rank_local(clean, records)
        self._notes += [note] if note is not None else []
        result.codes = run.codes
        result.compared = check.compared(clean, records)
        result.not_compared = check.not_compared(clean, records)
        result.samples_miscounted = check.miscounted(clean, records)
        result.steps_repeated = records.steps_repeated
        return result


class _Disturbed:
    """A run while its faults strike.

    Args:
        run: the run; it has not been started.
        strikes: its faults, in order.
        commits: how many commits it is to make.

    Attributes:
        result: the faults that struck or were missed, and whether training continued.
        mapped: inodes of the files in shared memory that its processes had mapped.
    """

    def __init__(self, run: ScriptRun, strikes: Sequence[Strike], commits: int) -> None:
        self._run = run
        self._strikes = strikes
        self._commits = commits
        self.result = Result(run.folder)
        self.mapped: set[int] = set()

    def go_through(self, *, to_its_end: bool) -> None:
        """Start the run, have its faults strike, and wait until it has made its commits.

        Args:
            to_its_end: whether it ends by itself; else it is asked to leave.
        """
        run = self._run
        try:
            for strike in self._strikes:
                run.add_options(FAULTS[strike.fault].options(run))
            run.start()
            for strike in self._strikes:
                self._strike(strike)
            while run.running and run.newest < self._commits:
                run.follow(_PATIENCE)
            if to_its_end:
                run.wait(_PATIENCE)
            else:
                run.leave()
        except DrillError as error:
            message = str(error)
            if struck := self.result.struck:
                fault = FAULTS[struck[-1].strike.fault]
                message = f"after '{fault.name}', where {fault.expected}: {message}"
            self.result.findings.append(Finding(check.TRAINS_AGAIN, message))

    def end_faults(self) -> None:
        """End the faults that last, in case the run did not get that far."""
        for each in self.result.struck:
            if (end := FAULTS[each.strike.fault].end) is not None:
                end(self._run)

    def _strike(self, strike: Strike) -> None:
        run, fault = self._run, FAULTS[strike.fault]
        while run.running and run.newest < strike.commit:
            run.follow(_PATIENCE)
        due = run.wait_until(lambda records: records.train_since(0.0) and fault.ready(run), _PATIENCE)
        if not due or run.newest > self._commits - _FEW:
            self.result.missed.append(strike)
            return
        logger.info("drill: %s: %s at commit %d", run.folder.name, strike.fault, run.newest)
        ranks = run.ranks()
        struck = Struck(strike, time.monotonic(), run.newest)
        self.result.struck.append(struck)
        fault.strike(run, ranks[strike.rank % len(ranks)])
        if fault.end is None:
            trains = run.wait_until(lambda records: records.train_since(struck.begun), _PATIENCE)
        else:
            trains = self._wait_for_commits()
            durable = complete(run)
            fault.end(run)
            self._wait_for_another(durable)
        if not trains and run.newest < self._commits:
            raise run.failure("the job ended")
        struck.recovered = True  # also if it made its last commits before it noticed the fault
        again = run.records().stepped_since(struck.begun)
        struck.seconds = None if again is None else again - struck.begun
        if trains:
            self._wait_for_commits()
        for process in run.job.processes():
            self.mapped |= check.shared_memory(process)

    def _wait_for_commits(self) -> bool:
        """Wait for a few commits; False if the run ended before."""
        run, before = self._run, self._run.newest
        return run.wait_until(
            lambda records: run.newest >= before + _FEW and records.train_since(0.0), _PATIENCE
        )

    def _wait_for_another(self, durable: Sequence[object]) -> None:
        """Wait until a commit becomes durable; a failed write is tried again after a pause."""
        deadline = time.monotonic() + _PAUSE
        while self._run.running and complete(self._run) == durable and time.monotonic() < deadline:
            time.sleep(_LOOK)


def _longest_silence(records: Records) -> float:
    """Return the longest time in seconds between two lines of one rank, in an undisturbed run."""
    times: dict[int, list[float]] = {}
    for line in sorted([*records.steps, *records.batches, *records.commits], key=lambda each: each.time):
        times.setdefault(line.rank, []).append(line.time)
    return max((later - earlier for each in times.values() for earlier, later in pairwise(each)), default=0.0)
