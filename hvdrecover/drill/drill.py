"""The drill itself: an undisturbed run, and runs with faults that are held against it."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hvdrecover.config import PREEMPTED
from hvdrecover.drill import history
from hvdrecover.drill.checks import losses, machine, script, temporary
from hvdrecover.drill.checks.rules import Finding
from hvdrecover.drill.disturbance import Disturbance
from hvdrecover.drill.faults import FAULTS, near
from hvdrecover.drill.faults.commits import damaged
from hvdrecover.drill.faults.fault import Fault
from hvdrecover.drill.lab.lab import Lab
from hvdrecover.drill.measured import longest_stall, measure, silences
from hvdrecover.drill.outcome import Outcome, Result
from hvdrecover.drill.runs import Command, Run
from hvdrecover.drill.schedule import Schedule, Strike, again, described, dumps
from hvdrecover.drill.testimony import Testimony
from hvdrecover.errors import DrillError
from hvdrecover.launch.hangs import FACTOR, LEAST_TIMEOUT
from hvdrecover.reporting import summary

logger = logging.getLogger(__name__)

PATIENCE = 300.0  # seconds without any progress until a run counts as stuck
_IN_VAIN = 2  # repeats of a run that was over before any of its faults could strike
_HANG_TIMEOUT = "--hang-timeout"
# Ranks wait for half of it for those on other hosts, and one that takes the place of a lost host's must have
# started by then.
_LEAST_OF_HOSTS = 20.0  # seconds


class Drill:
    """A drill.

    Args:
        folder: where all of it goes.
        command: how the script is started.
        duration: seconds after which a run is ended; None lets it come to its own end.
        data: a copy of training data that faults may change.
        lab: the hosts that all runs are to be on; by default they are on this one.
    """

    def __init__(
        self,
        folder: Path,
        command: Command,
        *,
        duration: float | None = None,
        data: Path | None = None,
        lab: Lab | None = None,
    ) -> None:
        self._folder = folder
        self._command = command
        self._duration = duration
        self._data = data
        self._lab = lab
        self._clean = Run(folder / "clean", command, data, lab)

    def rehearse(self) -> int:
        """Run the script undisturbed; how many commits it makes.

        Raises:
            DrillError: it fails even so, makes no commits, or should have virtual ranks and has none.
        """
        run = self._clean
        try:
            run.start()
            deadline = time.monotonic() + (self._duration or math.inf)
            while run.running and time.monotonic() < deadline:
                run.follow(PATIENCE)
            run.leave()
        finally:
            run.kill()
            near.forget(run)
        if run.codes[-1] not in (0, PREEMPTED):
            raise run.failure(f"the script fails even undisturbed, with exit code {run.codes[-1]}")
        if not (commits := run.testimony().newest):
            raise DrillError(
                "the script",
                "it makes no commits, so nothing can be recovered: call state.commit() in its training loop",
            )
        if run.resizes and not run.testimony().virtual:
            raise DrillError(
                "the script",
                "its result depends on the number of ranks: make its state with virtual_ranks=, or leave out "
                "--resize",
            )
        least = LEAST_TIMEOUT if self._lab is None else _LEAST_OF_HOSTS
        self._command = _with_hang_timeout(self._command, run.testimony(), least)
        return commits

    @property
    def seconds_per_commit(self) -> float:
        """Of the undisturbed run, on the average."""
        told = self._clean.testimony()
        times = [line.time for line in told.commits]
        return (times[-1] - times[0]) / max(1, told.newest - 1)

    def available(self, faults: Sequence[Fault]) -> tuple[list[Fault], dict[str, str]]:
        """Faults that may strike here, and why the others can't."""
        lacking = {fault.name: why for fault in faults if (why := fault.lacks(self._clean))}
        return [fault for fault in faults if fault.name not in lacking], lacking

    def strike(self, schedule: Schedule, skipped: Mapping[str, str]) -> Outcome:
        """Run the script once for each of a schedule's runs, with its faults.

        Faults for which a run is over too early strike in one more, but not for ever where none of them does.
        What is to strike is announced and stored before anything does.

        Args:
            schedule: the faults.
            skipped: what is reported as left out.
        """
        results: list[Result] = []
        runs = list(schedule.runs)
        in_vain = [0] * len(runs)  # how many runs for the same faults were over before any of them struck
        self._store(schedule)
        for number, strikes in enumerate(runs, 1):
            self._announce(number, strikes)
        while len(results) < len(runs):
            place = len(results)
            results.append(result := self._run(place + 1, runs[place]))
            vain = 0 if result.struck else in_vain[place] + 1
            if result.missed and vain <= _IN_VAIN and not result.findings:
                runs.append(again(result.missed, self._clean.newest))
                in_vain.append(vain)
                self._announce(len(runs), runs[-1])
        schedule = replace(schedule, runs=tuple(runs))
        self._store(schedule)
        leaving = [seconds for result in results for seconds in result.run.leaving]
        clean = self._clean.folder / "events"
        measured = measure(clean, self._clean.testimony(), [each.log for each in results], leaving)
        stall = longest_stall([clean, *(each.run.folder / "events" for each in results)])
        return Outcome(schedule, measured, stall, results, skipped, self._folder)

    def _store(self, schedule: Schedule) -> None:
        (self._folder / "schedule.json").write_text(dumps(schedule))

    def _announce(self, number: int, strikes: Sequence[Strike]) -> None:
        """Say which faults a run is to have."""
        logger.info("drill: %s is to have %s", _name(number), described(strikes, self._command.processes))

    def _run(self, number: int, strikes: Sequence[Strike]) -> Result:
        run = Run(self._folder / _name(number), self._command, self._data, self._lab)
        run.begin_like(self._clean)
        disturbance = Disturbance(run, strikes, self._clean.newest, PATIENCE)
        try:
            disturbance.go_through(to_its_end=self._duration is None)
            findings = [*disturbance.findings, *machine.orphans([] if run.running else run.left())]
        finally:
            run.kill()
            # One that lasts may not have been ended, and hosts and data are those of all runs.
            for each in disturbance.struck:
                FAULTS[each.strike.fault].end(run)
            near.forget(run)
            for name in {strike.fault for strike in strikes}:
                FAULTS[name].clean_up(run)
        clean, told, log = self._clean.testimony(), run.testimony(), history.read(run)
        return Result(
            run=run,
            log=log,
            report=summary.summarise(log),
            struck=disturbance.struck,
            missed=disturbance.missed,
            findings=[*findings, *self._of_script(told), *self._of_machine(run, disturbance)],
            rank_local=script.replaced(clean, told),
            compared=script.compared(clean, told),
            samples_lost=script.samples_lost(clean, told),
            left=temporary.left(run.folder / "tmp"),
            unproven=losses.unproven(clean, told, ended=self._duration is None),
        )

    def _of_script(self, told: Testimony) -> list[Finding]:
        clean = self._clean.testimony()
        causes = [
            *script.steps_before_commits(clean),
            *script.overwritten(clean, told),
            *script.counters(clean, told),
            *script.batches(clean, told),
            *script.samples(clean, told),
        ]
        ends = losses.compare(clean, told) if self._duration is None and told.commits else []
        return [*causes, *script.weights(clean, told, explained=bool(causes)), *ends]

    def _of_machine(self, run: Run, disturbance: Disturbance) -> list[Finding]:
        return [
            *machine.leftovers(disturbance.mapped),
            *temporary.leaks(*(temporary.ended(each.folder / "temporary") for each in (self._clean, run))),
            *machine.growth(disturbance.sizes),
            *machine.root(str(run.root), damaged(run)),
            *(machine.exits(run.codes[-1], self._clean.codes[-1]) if run.codes else []),
        ]


def _name(number: int) -> str:
    """The folder of a run with faults."""
    return f"faults-{number}"


def _with_hang_timeout(command: Command, told: Testimony, least: float) -> Command:
    """A limit for hangs that suits the script, unless the user has set one."""
    if _HANG_TIMEOUT in command.options:
        return command
    seconds = max(least, math.ceil(FACTOR * max(silences(told), default=0.0)))
    return replace(command, options=(*command.options, _HANG_TIMEOUT, f"{seconds:g}"))
