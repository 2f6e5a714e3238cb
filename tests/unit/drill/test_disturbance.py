"""The moments at which faults strike in a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from hvdrecover.drill.disturbance import Disturbance
from hvdrecover.drill.runs import Run
from hvdrecover.drill.schedule import Strike

COMMITS = 20
PATIENCE = 1.0


class SlowRun:
    """A run each of whose commits takes all of a drill's patience."""

    newest = 0
    left = False

    @property
    def running(self) -> bool:
        return not self.left

    def prepare(self, faults: Any) -> None:
        pass

    def start(self) -> None:
        pass

    def follow(self, timeout: float) -> None:
        assert timeout == PATIENCE
        self.newest += 1

    def wait_until(self, true: Callable[[Any], bool], timeout: float) -> bool:
        return True

    def leave(self) -> None:
        self.left = True


def test_a_fault_may_be_further_away_than_the_patience_for_one_commit() -> None:
    run = SlowRun()
    strike = Strike("kill", 0, COMMITS - 1)  # too late for a recovery, so that it is tried in another run
    disturbance = Disturbance(cast(Run, run), [strike], COMMITS, PATIENCE)
    disturbance.go_through(to_its_end=False)
    assert (disturbance.findings, disturbance.missed, run.newest) == ([], [strike], COMMITS)
