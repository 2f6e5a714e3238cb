"""Which faults strike when: decided by a seed, stored as JSON, and replayed exactly.

Faults strike at commits, not at times, so a replay finds the same state on a faster or slower machine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hvdrecover.drill.faults import FAULTS
from hvdrecover.errors import ConfigError

SPACE = 4  # least number of commits between faults, for a recovery to end and a standby to be ready


@dataclass(frozen=True)
class Strike:
    """One planned fault.

    Attributes:
        fault: its name.
        rank: the rank that it strikes, if it strikes one.
        commit: the number of commits after which it strikes.
    """

    fault: str
    rank: int
    commit: int

    def whom(self, size: int) -> str:
        """Return whom it strikes, of so many ranks; '' if it strikes no single rank."""
        if not FAULTS[self.fault].of_rank:
            return ""
        if self.fault == "host-cut-off":  # the first host, which has rank 0, is never struck
            return f"the host of rank {1 + self.rank % (size - 1)}" if size > 1 else ""
        return f"rank {self.rank % size}"


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

    def dumps(self) -> str:
        """Return the schedule as JSON."""
        return json.dumps(asdict(self), indent=1) + "\n"


def each_once(names: Sequence[str], *, seed: int, processes: int, commits: int, repeat: int = 1) -> Schedule:
    """Have each fault strike once, in as few runs as leave room between the faults.

    Args:
        names: the faults.
        seed: decides on order, ranks and commits.
        processes: number of ranks.
        commits: number of commits of an undisturbed run.
        repeat: how often each fault strikes.
    """
    chance = random.Random(seed)
    order = [name for name in names for _ in range(repeat)]
    chance.shuffle(order)
    room = max(1, (commits - 1) // SPACE - 1)
    count = -(-len(order) // room)
    parts = [order[place::count] for place in range(count)]
    return Schedule(seed, processes, tuple(_spread(part, chance, processes, commits) for part in parts))


def at_random(
    names: Sequence[str], *, seed: int, processes: int, commits: int, mean: float, repeat: int = 1
) -> Schedule:
    """Have faults strike at random and independently; each strikes once before any strikes again.

    Args:
        names: the faults.
        seed: decides on everything that is random.
        processes: number of ranks.
        commits: number of commits of an undisturbed run.
        mean: mean number of commits between faults.
        repeat: number of runs.
    """
    chance = random.Random(seed)
    runs = []
    for _ in range(repeat):
        strikes: list[Strike] = []
        left: list[str] = []
        place = 1 + chance.expovariate(1 / mean)
        while place < commits - 1:
            left = left or chance.sample(names, len(names))
            strikes.append(Strike(left.pop(), chance.randrange(processes), int(place)))
            place += chance.expovariate(1 / mean)
        runs.append(tuple(strikes))
    return Schedule(seed, processes, tuple(runs))


def again(strikes: Sequence[Strike], commits: int) -> tuple[Strike, ...]:
    """Plan faults for which a run ended too early for another run, at equal distances."""
    width = (commits - 1) / (len(strikes) + 1)
    return tuple(replace(strike, commit=max(1, round(n * width))) for n, strike in enumerate(strikes, 1))


def described(strikes: Sequence[Strike], size: int) -> str:
    """Return in words which faults will strike which ranks, and when."""
    words = []
    for strike in strikes:
        whom = strike.whom(size)
        words.append(f"{strike.fault}{f' ({whom})' if whom else ''} at commit {strike.commit}")
    return ", ".join(words)


def load(path: Path) -> Schedule:
    """Read a stored schedule.

    Raises:
        ConfigError: the file holds none.
    """
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
        runs = tuple(tuple(Strike(**strike) for strike in run) for run in facts["runs"])
        return Schedule(int(facts["seed"]), int(facts["processes"]), runs)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError("--replay", f"'{path}' holds no schedule of a drill: {error}") from error


def _spread(names: Sequence[str], chance: random.Random, processes: int, commits: int) -> tuple[Strike, ...]:
    """Plan faults at nearly equal distances; the last one leaves room for a recovery."""
    width = (commits - 1) / (len(names) + 1)
    strikes = []
    for number, name in enumerate(names, 1):
        commit = round(number * width + chance.uniform(-width / 4, width / 4))
        strikes.append(Strike(name, chance.randrange(processes), max(1, min(commit, commits - 2))))
    return tuple(strikes)
