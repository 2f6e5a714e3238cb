"""A drill: one undisturbed run of a script, and runs with faults that are compared with it.

1. The script runs undisturbed, and its commits are counted.
2. `schedule` decides by a seed which fault strikes whom at which commit. Faults strike at commits, not at
   times, so they find the same state on a faster or slower machine.
3. The script runs with these faults, and each commit is compared with the undisturbed run's.
4. `Outcome` draws the verdict from all runs.
"""

from __future__ import annotations

import logging
import math
import random
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from hvdrecover import config
from hvdrecover.config import LEAST_TIMEOUT, PREEMPTED
from hvdrecover.drill import check
from hvdrecover.drill.check import Comparison, Finding, compare
from hvdrecover.drill.faults import FAULTS, Fault, complete
from hvdrecover.drill.lab import Lab
from hvdrecover.drill.run import PATIENCE, Command, ScriptRun
from hvdrecover.drill.witness import Records
from hvdrecover.errors import ConfigError, DrillError
from hvdrecover.launch.waits import HANG_FACTOR
from hvdrecover.reporting.summary import Tally
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


@dataclass
class Strike:
    fault: str
    rank: int  # that it strikes, if it strikes one rank
    commit: int  # the number of commits after which it strikes
    recovered: bool | None = None  # whether training continued after it; None if it has not struck
    seconds: float | None = None  # from the fault until all ranks of the next rendezvous had begun a step

    def __str__(self) -> str:
        host = "the host of " if self.fault == "host-cut-off" else ""
        who = f" ({host}rank {self.rank})" if FAULTS[self.fault].of_rank else ""
        return f"{self.fault}{who} at commit {self.commit}"


@dataclass(frozen=True)
class Schedule:
    seed: int
    processes: int
    runs: tuple[tuple[Strike, ...], ...]


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


def _spread(strikes: Sequence[Strike], commits: int, chance: random.Random | None) -> tuple[Strike, ...]:
    """Have faults strike at nearly equal distances; the last one leaves room for a recovery."""
    width, placed = (commits - 1) / (len(strikes) + 1), []
    for number, strike in enumerate(strikes, 1):
        offset = chance.uniform(-width / 4, width / 4) if chance else 0.0
        commit = max(1, min(round(number * width + offset), commits - 2))
        placed.append(Strike(strike.fault, strike.rank, commit))
    return tuple(placed)


# -- the verdict ---------------------------------------------------------------------------------------


@dataclass
class Result:
    folder: Path
    struck: list[Strike] = field(default_factory=list)
    missed: list[Strike] = field(default_factory=list)  # the run ended too early for these
    findings: list[Finding] = field(default_factory=list)
    codes: list[int] = field(default_factory=list)  # exit codes of its starts
    comparison: Comparison = field(default_factory=Comparison)
    steps_repeated: int = 0


@dataclass
class Outcome:
    """The outcome of a drill; ``verdict.json`` has the same names."""

    folder: Path
    schedule: Schedule
    skipped: Mapping[str, str]  # for each fault that cannot strike here, the reason
    runs: Sequence[Result]
    recovers: bool = field(init=False)  # rank-local state aside
    verdict: str = field(init=False)  # in a few words
    findings: Sequence[Finding] = field(init=False)  # the failed checks of all runs, each check once
    notes: Sequence[Finding] = field(init=False)  # about rank-local state and unchecked samples
    kinds: Mapping[str, Tally] = field(init=False)  # of faults; seconds until all ranks trained again

    def __post_init__(self) -> None:
        self.findings = _first_of_each(finding for run in self.runs for finding in run.findings)
        self.notes = _first_of_each(note for run in self.runs for note in run.comparison.notes)
        results: dict[str, list[tuple[bool, float | None]]] = {}
        for struck in (strike for run in self.runs for strike in run.struck):
            results.setdefault(struck.fault, []).append((struck.recovered is True, struck.seconds))
        self.kinds = {name: Tally.of(each) for name, each in results.items()}
        self.recovers = not self.findings and bool(results)
        self.verdict = "recovers" if self.recovers else "does not recover"
        if self.recovers and any(note.check == check.RANK_LOCAL for note in self.notes):
            self.verdict += ", but for rank-local state"

    def text(self) -> str:
        compared = [run.comparison for run in self.runs]
        commits, steps = sum(each.compared for each in compared), sum(run.steps_repeated for run in self.runs)
        miscounted = sum(each.samples_miscounted for each in compared)
        lines = [f"verdict: the script {self.verdict}", ""]
        for mark, findings in (("FAILED", self.findings), ("ok, but", self.notes)):
            for each in findings:
                lines += [f"{mark}: {each.check}", f"  {each.message}", f"  What to do: {each.remedy}", ""]
        lines.append(f"{'fault':16} {'struck':>6} {'recovered':>9}  training again after")
        for name, kind in self.kinds.items():
            spent = "it never stopped" if kind.recovered else "it did not"
            if kind.median is not None:
                worst = f" (median; worst {kind.worst:.1f} s)" if kind.count > 1 else ""
                spent = f"{kind.median:.1f} s{worst}"
            lines.append(f"{name:16} {kind.count:6} {kind.recovered:9}  {spent}")
        lines += [f"{name:16} not possible here: needs {why}" for name, why in self.skipped.items()]
        lines += ["", f"{commits} commits compared bit by bit with those of the undisturbed run"]
        lines.append(f"{miscounted} samples lost or repeated, {counted(steps, 'step')} repeated")
        lines += dict.fromkeys(each.not_compared for each in compared if each.not_compared)
        lines.append(f"all files are in {self.folder}; a run's story:")
        lines += [f"  hvdrecover report {run.folder / 'events'}" for run in self.runs[:3]]
        return "\n".join(lines) + "\n"


def _first_of_each(findings: Iterable[Finding]) -> list[Finding]:
    first: dict[str, Finding] = {}
    for finding in findings:
        first.setdefault(finding.check, finding)
    return [*first.values()]


# -- the drill -----------------------------------------------------------------------------------------


class Drill:
    """A drill of one command. With a ``duration``, each run is ended after so many seconds."""

    def __init__(self, folder: Path, command: Command, duration: float | None, lab: Lab | None) -> None:
        self._folder, self._command, self._duration, self._lab = folder, command, duration, lab
        self._clean = Records()  # of the undisturbed run
        self._code = 0  # its exit code

    def run(self, faults: Sequence[Fault], *, seed: int, repeat: int) -> Outcome:
        """Run the script undisturbed, and then with the faults that can strike here."""
        skipped = {fault.name: why for fault in faults if (why := fault.lacks(self._command, self._lab))}
        chosen = [fault.name for fault in faults if fault.name not in skipped]
        if not chosen:
            reasons = "; ".join(f"{fault} needs {why}" for fault, why in skipped.items())
            raise ConfigError("--faults", f"these faults can't strike here: {reasons}")
        logger.info("drill: the undisturbed run begins; all files of the drill go to %s", self._folder)
        self._rehearse()
        processes, commits = self._command.processes, self._clean.newest
        plan = schedule(chosen, seed=seed, processes=processes, commits=commits, repeat=repeat)
        runs, results, most = [*plan.runs], list[Result](), _MOST_RUNS * len(plan.runs)
        while len(results) < len(runs):
            number, strikes = len(results) + 1, runs[len(results)]
            logger.info("drill: faults-%d is to have %s", number, ", ".join(map(str, strikes)))
            results.append(result := self._run(number, strikes))
            if result.missed and not result.findings and len(runs) < most:
                runs.append(_spread(result.missed, commits, None))
        return Outcome(self._folder, replace(plan, runs=tuple(runs)), skipped, results)

    def _rehearse(self) -> None:
        run = ScriptRun(self._folder / "clean", self._command, self._lab)
        try:
            run.start()
            deadline = time.monotonic() + (self._duration or math.inf)
            while run.job.running and time.monotonic() < deadline:
                run.follow_to(run.newest + 1)
            run.leave()
        finally:
            run.kill()
        self._clean, self._code = run.records(), run.codes[-1]
        if self._code not in (0, PREEMPTED):
            raise run.job.failure(f"the script fails even undisturbed, with exit code {self._code}")
        if not self._clean.newest:
            problem = "nothing can be recovered: call state.commit() in its training loop"
            raise DrillError("the script", f"it makes no commits, so {problem}")
        if self._command.resizes and not self._clean.virtual:
            remedy = "make its state with virtual_ranks=, or leave out --resize"
            raise DrillError("the script", f"its result depends on the number of ranks: {remedy}")
        if _HANG_TIMEOUT not in self._command.options and config.read().hang_timeout is None:
            least = LEAST_TIMEOUT if self._lab is None else _LEAST_ON_HOSTS
            seconds = max(least, math.ceil(HANG_FACTOR * _longest_silence(self._clean)))
            options = (*self._command.options, _HANG_TIMEOUT, f"{seconds:g}")
            self._command = replace(self._command, options=options)

    def _run(self, number: int, strikes: Sequence[Strike]) -> Result:
        run = ScriptRun(self._folder / f"faults-{number}", self._command, self._lab)
        shutil.copytree(self._folder / "clean" / "initial", run.root)  # the same initial state
        result = Result(run.folder)
        left: list[int] = []
        try:
            run.start()
            for strike in strikes:
                self._strike(run, strike, result)
            run.follow_to(self._clean.newest)
            if self._duration is None:
                run.wait(PATIENCE)
            else:
                run.leave()
            left = run.job.processes()
        except DrillError as error:
            message = str(error)
            if result.struck:
                fault = FAULTS[result.struck[-1].fault]
                message = f"after '{fault.name}', where {fault.expected}: {message}"
            result.findings.append(Finding(check.TRAINS_AGAIN, message))
        finally:
            run.kill()
            for struck in result.struck:  # the next run uses the same hosts
                if end := FAULTS[struck.fault].end:
                    end(run)
        if not result.findings:
            result.findings = check.machine(run, left, self._code)
        faulty = run.records()
        result.comparison = compare(self._clean, faulty)
        result.findings += result.comparison.findings
        result.steps_repeated, result.codes = faulty.steps_repeated, run.codes
        return result

    def _strike(self, run: ScriptRun, strike: Strike, result: Result) -> None:
        """Have a fault strike a run, and wait until training has continued for a few commits."""
        fault = FAULTS[strike.fault]
        run.follow_to(strike.commit)
        due = run.wait_until(lambda records: records.train_since(0.0))
        if not due or run.newest > self._clean.newest - _FEW:
            result.missed.append(strike)
            return
        logger.info("drill: %s: %s at commit %d", run.folder.name, strike.fault, run.newest)
        ranks = list(run.ranks())
        begun, strike.commit, strike.recovered = time.monotonic(), run.newest, False
        result.struck.append(strike)
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
        if not trains and run.newest < self._clean.newest:
            raise run.job.failure("the job ended")
        strike.recovered = True  # also if it made its last commits before it noticed the fault
        again = run.records().stepped_since(begun)
        strike.seconds = None if again is None else again - begun
        if trains:
            _wait_for_commits(run)


def _wait_for_commits(run: ScriptRun) -> bool:
    """Wait for a few commits; False if the run ended before."""
    before = run.newest
    return run.wait_until(lambda records: records.reached >= before + _FEW and records.train_since(0.0))


def _longest_silence(records: Records) -> float:
    """Return the longest time in seconds between two lines of one rank, in an undisturbed run."""
    times: dict[int, list[float]] = {}
    for line in records.lines:
        if line.what != "agreed":
            times.setdefault(line.rank, []).append(line.time)
    return max((later - earlier for each in times.values() for earlier, later in pairwise(each)), default=0.0)
