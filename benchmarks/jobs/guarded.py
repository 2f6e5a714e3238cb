"""Two trainings that step by turns, one with a guard and one without, on each worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Protocol

from benchmarks.measure import stopwatch
from benchmarks.states import Setting
from hvdrecover.guard import Guard
from hvdrecover.state.state import State

RESULT = "guard.json"
_PAIRS = {
    "large": 1,
    "digits": 20,
    "digits-tensorflow": 20,
}  # where one's objects lie makes 1% of a short step
_STEPS = {
    "large": 60,
    "digits": 2000,
    "digits-tensorflow": 1000,
}  # of each pair; of fewer, the median is off by 1%
_COMMITS = 20
_WARMUPS = 3


class Training(Protocol):
    """The things that are measured.

    Attributes:
        state: what it commits.
        sending: milliseconds of a core that this thread took to send gradients since it was set to 0.
    """

    state: State
    sending: float

    def step(self) -> None:
        """Train on one batch, as the digits example does."""


def compare(setting: Setting, make: Callable[[Guard | None], Training], *, writes: bool) -> None:
    """Take the times of steps by turns, then of commits by turns; all in milliseconds."""
    found: dict[str, list[list[float]]] = {name: [[], []] for name in ("steps", "sending", "commits")}
    for pair in range(setting.rounds(_PAIRS[setting.state])):
        trainings = _pair(make, pair % 2)
        for number in range(setting.rounds(_STEPS[setting.state]) + _WARMUPS):
            for place in (0, 1) if number % 2 else (1, 0):
                trainings[place].sending = 0.0
                taken = 1e3 * stopwatch(trainings[place].step)
                if number >= _WARMUPS:
                    found["steps"][place].append(taken)
                    found["sending"][place].append(trainings[place].sending)
    for number in range(setting.rounds(_COMMITS) + _WARMUPS):
        for place, training in enumerate(trainings):
            training.step()
            taken = 1e3 * stopwatch(training.state.commit)
            if number >= _WARMUPS:
                found["commits"][place].append(taken)
    if writes:
        (setting.folder / RESULT).write_text(json.dumps(found))


def _pair(make: Callable[[Guard | None], Training], first: int) -> list[Training]:
    """One with a guard and one without; ``first`` is made first."""
    made = {place: make(None if place else Guard(parameters_every_commits=1)) for place in (first, 1 - first)}
    return [made[0], made[1]]
