"""A drill: one undisturbed run of a script, and runs with faults that are compared with it.

1. `Drill.rehearse` runs the script undisturbed, and counts its commits.
2. `schedule` decides by a seed which fault strikes whom at which commit. Faults strike at commits, not at
   times, so they find the same state on a faster or slower machine.
3. `Drill.strike` runs the script with these faults, and compares each commit with the undisturbed run's.
4. `conclude` draws the verdict from all runs.
"""

from __future__ import annotations

import json
import logging
import math
import random
import shutil
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from hvdrecover import config
from hvdrecover.config import LEAST_TIMEOUT, PREEMPTED
from hvdrecover.drill import check
from hvdrecover.drill.check import Comparison, Finding, compare
from hvdrecover.drill.faults import FAULTS, complete
from hvdrecover.drill.lab import Lab
from hvdrecover.drill.records import Records
from hvdrecover.drill.run import PATIENCE, Command, ScriptRun
from hvdrecover.errors import DrillError
from hvdrecover.launch.hangs import FACTOR
from hvdrecover.reporting.text import counted

logger = logging.getLogger(__name__)

SPACE = 4  # least number of commits between faults, for a recovery to end and a standby to be ready
_MOST_RUNS = 3  # for each planned run: a run may end before any of its faults could strike
_HANG_TIMEOUT = "--hang-timeout"
# Ranks wait half of it for ranks on other hosts; a replacement must have started by then.
_LEAST_ON_HOSTS = 20.0  # seconds
_PAUSE = 30.0  # seconds to wait for a durable commit after a fault of the storage
_FEW = 2  # commits during which a lasting fault strikes, and during which training continues after it
_LOOK = 0.1  # seconds


# -- the plan ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strike:
    """One planned fault.

    Attributes:
        fault: its name.
        rank: the rank that it strikes, if it strikes one rank.
        commit: the number of commits after which it strikes.
    """

    fault: str
    rank: int
    commit: int

    def __str__(self) -> str:
        if self.fault == "host-cut-off":
            who = f" (the host of rank {self.rank})"
        else:
            who = f" (rank {self.rank})" if FAULTS[self.fault].of_rank else ""
        return f"{self.fault}{who} at commit {self.commit}"


@dataclass(frozen=True)
class Schedule:
    """The faults of a drill.

    Attributes:
        seed: the seed that decided it.
        processes: number of ranks.
        runs: for each run of the script its faults, in order.
    """

    seed: int
    processes: int
    runs: tuple[tuple[Strike, ...], ...]

    def store(self, path: Path) -> None:
        """Write the schedule as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def schedule(names: Sequence[str], *, seed: int, processes: int, commits: int, repeat: int = 1) -> Schedule:
    """Have each fault strike once, in as few runs as leave room between the faults."""
    chance = random.Random(seed)
    order = [name for name in names for _ in range(repeat)]
    chance.shuffle(order)
    count = -(-len(order) // max(1, (commits - 1) // SPACE - 1))  # runs
    # The first host of a lab has the supervisor, and rank 0 at the start: it is never cut off.
    first = {name: 1 if name == "host-cut-off" else 0 for name in order}
    strikes = [Strike(name, chance.randrange(first[name], processes), 0) for name in order]
    runs = (_spread(strikes[place::count], commits, chance) for place in range(count))
    return Schedule(seed, processes, tuple(runs))


def _spread(
    strikes: Sequence[Strike], commits: int, chance: random.Random | None = None
) -> tuple[Strike, ...]:
    """Have faults strike at nearly equal distances; the last one leaves room for a recovery."""
    width, placed = (commits - 1) / (len(strikes) + 1), []
    for number, strike in enumerate(strikes, 1):
        offset = chance.uniform(-width / 4, width / 4) if chance else 0.0
        commit = max(1, min(round(number * width + offset), commits - 2))
        placed.append(Strike(strike.fault, strike.rank, commit))
    return tuple(placed)


# -- the drill -----------------------------------------------------------------------------------------


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
        if _HANG_TIMEOUT not in self._command.options and config.read().hang_timeout is None:
            least = LEAST_TIMEOUT if self._lab is None else _LEAST_ON_HOSTS
            seconds = max(least, math.ceil(FACTOR * _longest_silence(self.clean)))
            options = (*self._command.options, _HANG_TIMEOUT, f"{seconds:g}")
            self._command = replace(self._command, options=options)
        return self.clean.newest

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
                again = _spread(result.missed, self.clean.newest)
                schedule = replace(schedule, runs=(*schedule.runs, again))
                _announce(len(schedule.runs), again)
        schedule.store(self._folder / "schedule.json")
        return conclude(self._folder, schedule, results, skipped)

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
        faulty = run.records()
        result.comparison = compare(self.clean, faulty)
        result.findings += result.comparison.findings
        result.steps_repeated, result.codes = faulty.steps_repeated, run.codes
        return result

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
        if line.what != "agreed":
            times.setdefault(line.rank, []).append(line.time)
    return max((later - earlier for each in times.values() for earlier, later in pairwise(each)), default=0.0)


# -- the verdict ---------------------------------------------------------------------------------------


@dataclass
class Struck:
    """A fault that has struck."""

    strike: Strike
    commit: int  # the number of commits when it struck
    recovered: bool = False  # training continued; if the fault lasts, also after its end
    seconds: float | None = None  # until all ranks trained again; None if they never stopped


@dataclass
class Result:
    """The result of one run with faults."""

    folder: Path
    struck: list[Struck] = field(default_factory=list)
    missed: list[Strike] = field(default_factory=list)  # the run ended too early for these
    findings: list[Finding] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)  # exit codes of its starts
    comparison: Comparison | None = None
    steps_repeated: int = 0


@dataclass(frozen=True)
class Kind:
    """How often a fault struck, and the seconds until all ranks trained again."""

    count: int
    recovered: int
    median: float | None
    worst: float | None


@dataclass(frozen=True)
class Outcome:
    """The outcome of a drill; ``verdict.json`` has the same names."""

    folder: Path
    recovers: bool  # rank-local state aside
    verdict: str  # in a few words
    schedule: Schedule
    findings: Sequence[Finding]  # the failed checks of all runs, each check once
    notes: Sequence[Finding]  # about rank-local state and unchecked samples; they are no failures
    skipped: Mapping[str, str]  # for each fault that cannot strike here, the reason
    kinds: Mapping[str, Kind]  # of faults
    runs: Sequence[Result]


def conclude(folder: Path, schedule: Schedule, runs: Sequence[Result], skipped: Mapping[str, str]) -> Outcome:
    """Draw the conclusions from all runs with faults."""
    findings: dict[str, Finding] = {}
    notes: dict[str, Finding] = {}
    by_name: dict[str, list[Struck]] = {}
    for run in runs:
        for finding in run.findings:
            findings.setdefault(finding.check, finding)
        for note in run.comparison.notes if run.comparison else ():
            notes.setdefault(note.check, note)
        for struck in run.struck:
            by_name.setdefault(struck.strike.fault, []).append(struck)
    kinds = {}
    for name, all_struck in by_name.items():
        seconds = [each.seconds for each in all_struck if each.seconds is not None]
        median = statistics.median(seconds) if seconds else None
        recovered = sum(each.recovered for each in all_struck)
        kinds[name] = Kind(len(all_struck), recovered, median, max(seconds, default=None))
    recovers = not findings and bool(by_name)
    verdict = "recovers" if recovers else "does not recover"
    if recovers and check.RANK_LOCAL in notes:
        verdict += ", but for rank-local state"
    return Outcome(
        folder, recovers, verdict, schedule, [*findings.values()], [*notes.values()], skipped, kinds, runs
    )


def text(outcome: Outcome) -> str:
    """Return the verdict as text for a person."""
    compared = [run.comparison for run in outcome.runs if run.comparison]
    commits, steps = sum(each.compared for each in compared), sum(run.steps_repeated for run in outcome.runs)
    miscounted = sum(each.samples_miscounted for each in compared)
    lines = [f"verdict: the script {outcome.verdict}", ""]
    for mark, findings in (("FAILED", outcome.findings), ("ok, but", outcome.notes)):
        for each in findings:
            lines += [f"{mark}: {each.check}", f"  {each.message}", f"  What to do: {each.remedy}", ""]
    lines.append(f"{'fault':16} {'struck':>6} {'recovered':>9}  training again after")
    for name, kind in outcome.kinds.items():
        lines.append(f"{name:16} {kind.count:6} {kind.recovered:9}  {_time(kind)}")
    lines += [f"{name:16} not possible here: needs {why}" for name, why in outcome.skipped.items()]
    lines += ["", f"{commits} commits compared bit by bit with those of the undisturbed run"]
    lines.append(f"{miscounted} samples lost or repeated, {counted(steps, 'step')} repeated")
    lines += dict.fromkeys(each.not_compared for each in compared if each.not_compared)
    lines.append(f"all files are in {outcome.folder}; a run's story:")
    lines += [f"  hvdrecover report {run.folder / 'events'}" for run in outcome.runs[:3]]
    return "\n".join(lines) + "\n"


def _time(kind: Kind) -> str:
    if kind.median is None:
        return "it never stopped" if kind.recovered == kind.count else "it did not"
    words = f"{kind.median:.1f} s"
    return words if kind.count == 1 else f"{words} (median; worst {kind.worst:.1f} s)"
