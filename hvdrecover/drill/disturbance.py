"""One run of a drill with its faults: when they strike, and when they count as recovered from."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from hvdrecover.drill.checks import machine, rules
from hvdrecover.drill.checks.machine import Size
from hvdrecover.drill.checks.rules import Finding
from hvdrecover.drill.faults import FAULTS
from hvdrecover.drill.faults.commits import complete
from hvdrecover.drill.faults.fault import Fault
from hvdrecover.drill.outcome import Struck
from hvdrecover.drill.runs import Run, has_stepped
from hvdrecover.drill.schedule import Strike
from hvdrecover.errors import DrillError

logger = logging.getLogger(__name__)

_LOOK = 0.1  # seconds
_PAUSE = 30.0  # seconds for a durable commit after a fault of the storage; some scripts make few of them
_FEW = 2  # commits in which a lasting fault strikes, and in which training continues after it


class Disturbance:
    """A run that is disturbed.

    Args:
        run: the run; it has not been started.
        strikes: its faults, in order.
        commits: how many commits it is to make.
        patience: seconds without progress until it counts as stuck.

    Attributes:
        struck: the faults that have struck.
        missed: those for which it was over too early.
        findings: the rule that is broken if it does not continue.
        mapped: inodes of what its processes have had mapped of shared memory.
    """

    def __init__(self, run: Run, strikes: Sequence[Strike], commits: int, patience: float) -> None:
        self._run = run
        self._strikes = strikes
        self._commits = commits
        self._patience = patience
        self._sizes: dict[int, list[Size]] = {}
        self.struck: list[Struck] = []
        self.missed: list[Strike] = []
        self.findings: list[Finding] = []
        self.mapped: set[int] = set()

    @property
    def sizes(self) -> list[list[Size]]:
        """Of each process that lives through faults, what it took after each."""
        return list(self._sizes.values())

    def go_through(self, *, to_its_end: bool) -> None:
        """Start the run, have its faults strike, and wait until it has made its commits.

        Args:
            to_its_end: whether it ends by itself; else it is asked to leave then.
        """
        try:
            self._run.prepare({strike.fault: FAULTS[strike.fault] for strike in self._strikes}.values())
            self._run.start()
            for strike in self._strikes:
                self._let_strike(strike)
            while self._run.running and self._run.newest < self._commits:
                self._run.follow(self._patience)
            if to_its_end:
                self._run.wait(self._patience)
            else:
                self._run.leave()
        except DrillError as error:
            after = f"after {self.struck[-1].strike.fault}: " if self.struck else ""
            self.findings.append(Finding(rules.STEPS_AGAIN, f"{after}{error}"))

    def _let_strike(self, strike: Strike) -> None:
        run, fault = self._run, FAULTS[strike.fault]
        while run.running and run.newest < strike.commit:
            run.follow(self._patience)
        due = run.wait_until(lambda told: has_stepped(told, 0.0) and fault.ready(run), self._patience)
        if not due or run.newest > self._commits - _FEW:
            self.missed.append(strike)
            return
        logger.info("drill: %s: %s at commit %d", run.folder.name, strike.fault, run.newest)
        ranks = run.ranks()
        rank = ranks[strike.rank % len(ranks)]
        whom = fault.whom(rank, len(ranks))
        struck = Struck(strike, time.monotonic(), time.time(), whom, run.newest)
        self.struck.append(struck)
        stepped_again = self._strike(fault, struck, rank)
        if not stepped_again and run.newest < self._commits:
            raise run.failure("the job ended")
        struck.recovered = True  # also if it made its last commits before it felt the fault
        if stepped_again:
            stepped = run.testimony().stepped_again(struck.begun)
            struck.seconds = None if stepped is None else stepped - struck.begun
            self._wait_for_commits()
        for process in run.left():
            self.mapped |= machine.shared_memory(process)
        for process in run.lasting() if run.running else []:
            if (size := machine.size_of(process)) is not None:
                self._sizes.setdefault(process, []).append(size)

    def _strike(self, fault: Fault, struck: Struck, rank: int) -> bool:
        """Let a fault strike, and wait until all ranks step again; False if the run has ended before."""
        run = self._run
        fault.strike(run, rank)
        if fault.may_stop:
            self._wait_for_steps(struck)
            fault.end(run)
            if not run.running:
                run.start_again()
            return self._wait_for_steps(struck)
        if fault.lasting:
            continued = self._wait_for_commits()
            durable = complete(run)
            fault.end(run)
            self._wait_for_other_than(durable)
            return continued
        return self._wait_for_steps(struck)

    def _wait_for_steps(self, struck: Struck) -> bool:
        return self._run.wait_until(lambda told: has_stepped(told, struck.begun), self._patience)

    def _wait_for_commits(self) -> bool:
        """Wait for a few commits."""
        run, before = self._run, self._run.newest
        return run.wait_until(
            lambda told: run.newest >= before + _FEW and has_stepped(told, 0.0), self._patience
        )

    def _wait_for_other_than(self, durable: Sequence[object]) -> None:
        """Commits that could not be made durable are tried again after a pause."""
        deadline = time.monotonic() + _PAUSE
        while self._run.running and complete(self._run) == durable and time.monotonic() < deadline:
            time.sleep(_LOOK)
