"""The drill itself: an undisturbed run, runs with faults, and what comes of them."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hvdrecover.config import PREEMPTED
from hvdrecover.drill import history
from hvdrecover.drill.advice import Measured
from hvdrecover.drill.checks import machine, rules, script
from hvdrecover.drill.checks.machine import Size
from hvdrecover.drill.checks.rules import Finding
from hvdrecover.drill.faults import FAULTS
from hvdrecover.drill.faults.commits import complete, damaged
from hvdrecover.drill.faults.fault import Fault
from hvdrecover.drill.measured import longest_stall, measure, silences
from hvdrecover.drill.runs import Command, Run, has_stepped
from hvdrecover.drill.schedule import Schedule, Strike, dumps
from hvdrecover.drill.slo import Numbers
from hvdrecover.drill.testimony import Testimony
from hvdrecover.errors import DrillError
from hvdrecover.launch.hangs import FACTOR, LEAST_TIMEOUT
from hvdrecover.reporting import summary
from hvdrecover.reporting.summary import Report

logger = logging.getLogger("hvdrecover")

PATIENCE = 300.0  # seconds without any progress until a run counts as stuck
HANG_TIMEOUT = "--hang-timeout"
_LOOK = 0.1  # seconds
_PAUSE = 30.0  # seconds for a durable commit after a fault of the storage; some scripts make few of them
_FEW = 2  # commits in which a lasting fault strikes, and in which training goes on after it


@dataclass
class Struck:
    """A fault that has struck.

    Attributes:
        strike: which, as planned.
        begun: when, in seconds of the monotonic clock.
        commit: how many commits there were.
        seconds: until all ranks were stepping again, or a lasting one was over; None if that never came.
    """

    strike: Strike
    begun: float
    commit: int
    seconds: float | None = None


@dataclass
class Result:
    """What has come of one run with faults.

    Attributes:
        run: the run.
        report: what its guardians tell.
        struck: its faults.
        missed: faults that did not strike, with the reason.
        findings: the rules that it has broken.
        compared: number of commits that were compared with the undisturbed run's, bit by bit.
        samples_lost: samples that were lost or repeated.
    """

    run: Run
    report: Report
    struck: list[Struck] = field(default_factory=list)
    missed: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    compared: int = 0
    samples_lost: int = 0


@dataclass
class Outcome:
    """What has come of a drill.

    Attributes:
        schedule: its faults.
        measured: stalls, silences and recoveries.
        longest_stall: for how long a commit kept training from going on at most, in seconds.
        results: what has come of the runs with faults.
        skipped: faults that can't strike here: name to reason.
        folder: where all of it is.
    """

    schedule: Schedule
    measured: Measured
    longest_stall: float | None
    results: list[Result]
    skipped: Mapping[str, str]
    folder: Path

    @property
    def findings(self) -> list[Finding]:
        """The rules that were broken, each once."""
        return list(
            {finding.rule: finding for result in self.results for finding in result.findings}.values()
        )

    @property
    def numbers(self) -> Numbers:
        """What it has come to."""
        faults = [fault for result in self.results for fault in result.report.faults]
        return Numbers(
            stall_seconds=self.longest_stall,
            recovery_seconds=max((f.recovery.seconds for f in faults if f.recovery), default=None),
            steps_lost=sum(result.report.steps_repeated for result in self.results),
            goodput=min(
                (r.report.goodput for r in self.results if r.report.goodput is not None), default=None
            ),
            samples_lost=sum(result.samples_lost for result in self.results),
        )

    @property
    def recovers(self) -> bool:
        """The verdict."""
        return not self.findings and any(result.struck for result in self.results)


class Drill:
    """A drill.

    Args:
        folder: where all of it goes.
        command: how the script is started.
        duration: seconds after which a run is ended; None lets it come to its own end.
        data: a copy of training data that faults may change.
        patience: seconds without progress until a run counts as stuck.
    """

    def __init__(
        self,
        folder: Path,
        command: Command,
        *,
        duration: float | None = None,
        data: Path | None = None,
        patience: float = PATIENCE,
    ) -> None:
        self._folder = folder
        self._command = command
        self._duration = duration
        self._data = data
        self._patience = patience
        self._clean: Run | None = None

    def rehearse(self) -> int:
        """Run the script undisturbed; how many commits it makes.

        Raises:
            DrillError: it fails even so, or makes no commits.
        """
        run = self._clean = Run(self._folder / "clean", self._command, self._data)
        try:
            run.start()
            deadline = time.monotonic() + (self._duration or float("inf"))
            while run.running and time.monotonic() < deadline:
                self._follow(run)
            run.leave()
        finally:
            run.kill()
        if run.codes[-1] not in (0, PREEMPTED):
            raise run.failure(f"the script fails even undisturbed, with exit code {run.codes[-1]}")
        if not (commits := run.testimony().newest):
            raise DrillError(
                "the script",
                "it makes no commits, so nothing can be recovered: call state.commit() in its training loop",
            )
        self._command = self._with_hang_timeout(run.testimony())
        return commits

    @property
    def seconds_per_commit(self) -> float:
        """Of the undisturbed run, on the average."""
        assert self._clean is not None
        times = [line.time for line in self._clean.testimony().commits]
        return (times[-1] - times[0]) / max(1, self._clean.testimony().newest - 1)

    def available(self, faults: Sequence[Fault]) -> tuple[list[Fault], dict[str, str]]:
        """Faults that may strike here, and why the others can't."""
        assert self._clean is not None
        lacking = {fault.name: why for fault in faults if (why := fault.lacks(self._clean))}
        return [fault for fault in faults if fault.name not in lacking], lacking

    def strike(self, schedule: Schedule, skipped: Mapping[str, str]) -> Outcome:
        """Run the script once for each of a schedule's runs, with its faults.

        Args:
            schedule: the faults.
            skipped: what is reported as left out.
        """
        assert self._clean is not None
        (self._folder / "schedule.json").write_text(dumps(schedule))
        results = [self._run(number, strikes) for number, strikes in enumerate(schedule.runs, 1)]
        logs = [history.read(each.run) for each in results]
        leaving = [seconds for result in results for seconds in result.run.leaving]
        clean = self._clean.folder / "events"
        measured = measure(clean, self._clean.testimony(), logs, leaving)
        stall = longest_stall([clean, *(each.run.folder / "events" for each in results)])
        return Outcome(schedule, measured, stall, results, skipped, self._folder)

    def _with_hang_timeout(self, told: Testimony) -> Command:
        """A limit for hangs that suits the script, unless the user has set one."""
        if HANG_TIMEOUT in self._command.options:
            return self._command
        seconds = max(LEAST_TIMEOUT, math.ceil(FACTOR * max(silences(told), default=0.0)))
        options = (*self._command.options, HANG_TIMEOUT, f"{seconds:g}")
        return replace(self._command, options=options)

    # -- one run ---------------------------------------------------------------------------------------

    def _run(self, number: int, strikes: Sequence[Strike]) -> Result:
        clean = self._clean
        assert clean is not None
        faults = {name: FAULTS[name] for name in {strike.fault for strike in strikes}}
        run = Run(self._folder / f"faults-{number}", self._command, data=self._data)
        run.begin_like(clean)
        run.prepare(faults.values())
        end = clean.testimony().newest
        struck: list[Struck] = []
        missed: dict[str, str] = {}
        sizes: dict[int, list[Size]] = {}
        mapped: set[int] = set()
        stuck: list[Finding] = []
        try:
            run.start()
            for strike in strikes:
                logger.info("drill: run %d: %s at commit %d", number, strike.fault, strike.commit)
                if not run.wait_until(self._due(run, strike), self._patience):
                    missed[strike.fault] = f"the run ended before commit {strike.commit}"
                    continue
                struck.append(self._strike(run, faults[strike.fault], strike))
                for process in run.lasting() if run.running else []:
                    if (size := machine.size_of(process)) is not None:
                        sizes.setdefault(process, []).append(size)
                for process in run.left():
                    mapped |= machine.shared_memory(process)
            while run.running and run.newest < end:
                self._follow(run)
            if self._duration is None:
                run.wait(self._patience)
            else:
                run.leave()
        except DrillError as error:
            stuck = [Finding(rules.STEPS_AGAIN, str(error))]
        left = run.left()
        run.kill()
        return self._judge(
            run, struck, missed, [*stuck, *machine.orphans(left if not stuck else [])], sizes, mapped
        )

    def _due(self, run: Run, strike: Strike) -> Callable[[Testimony], bool]:
        return lambda told: run.newest >= strike.commit and has_stepped(told, 0.0)

    def _strike(self, run: Run, fault: Fault, strike: Strike) -> Struck:
        """Let a fault strike, and wait until all ranks step again, and a few commits have been made."""
        struck = Struck(strike, time.monotonic(), run.newest)
        ranks = run.ranks()
        fault.strike(run, ranks[strike.rank % len(ranks)])
        if fault.may_stop:
            run.wait_until(lambda told: has_stepped(told, struck.begun), self._patience)
        elif fault.lasting:
            self._go_on(run)
        before = complete(run)
        fault.end(run)
        if fault.may_stop and not run.running:
            run.start_again()
        if not fault.lasting or fault.may_stop:
            run.wait_until(lambda told: has_stepped(told, struck.begun), self._patience)
        struck.seconds = time.monotonic() - struck.begun
        self._go_on(run)
        if fault.lasting:  # commits that could not be made durable are tried again after a pause
            deadline = time.monotonic() + _PAUSE
            while run.running and complete(run) == before and time.monotonic() < deadline:
                time.sleep(_LOOK)
        return struck

    def _follow(self, run: Run) -> None:
        """Wait for one more commit, or the end."""
        before = run.newest
        run.wait_until(lambda told: run.newest > before, self._patience)

    def _go_on(self, run: Run) -> None:
        before = run.newest
        run.wait_until(lambda told: run.newest >= before + _FEW and has_stepped(told, 0.0), self._patience)

    def _judge(
        self,
        run: Run,
        struck: list[Struck],
        missed: dict[str, str],
        findings: list[Finding],
        sizes: Mapping[int, Sequence[Size]],
        mapped: set[int],
    ) -> Result:
        assert self._clean is not None
        clean, told = self._clean.testimony(), run.testimony()
        causes = [
            *script.steps_before_commits(clean),
            *script.overwritten(clean, told),
            *script.counters(clean, told),
            *script.batches(clean, told),
            *script.samples(clean, told),
        ]
        checks = [
            *findings,
            *causes,
            *script.weights(clean, told, explained=bool(causes)),
            *machine.leftovers(mapped),
            *machine.growth(list(sizes.values())),
            *machine.root(str(run.root), damaged(run)),
        ]
        if run.codes:
            checks += machine.exits(run.codes[-1], self._clean.codes[-1])
        return Result(
            run,
            summary.summarise(history.read(run)),
            struck,
            missed,
            checks,
            script.compared(clean, told),
            script.samples_lost(clean, told),
        )
