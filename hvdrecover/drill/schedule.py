"""Which faults strike when: decided by a seed, stored as JSON, and replayed exactly.

Faults strike at commits, not at times, so a replay finds the same state on a faster or slower machine.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
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


def each_once(names: Sequence[str], *, seed: int, processes: int, commits: int, repeat: int = 1) -> Schedule:
    """Have each fault strike once, in as few runs as leave room between the faults."""
    chance = random.Random(seed)
    order = [name for name in names for _ in range(repeat)]
    chance.shuffle(order)
    count = -(-len(order) // max(1, (commits - 1) // SPACE - 1))  # runs
    strikes = [Strike(name, _rank(name, chance, processes), 0) for name in order]
    runs = (spread(strikes[place::count], commits, chance) for place in range(count))
    return Schedule(seed, processes, tuple(runs))


def at_random(
    names: Sequence[str], *, seed: int, processes: int, commits: int, mean: float, repeat: int = 1
) -> Schedule:
    """Have faults strike at random and independently; each strikes once before any strikes again."""
    chance = random.Random(seed)
    runs = []
    for _ in range(repeat):
        strikes: list[Strike] = []
        left: list[str] = []
        place = 1 + chance.expovariate(1 / mean)
        while place < commits - 1:
            left = left or chance.sample(names, len(names))
            name = left.pop()
            strikes.append(Strike(name, _rank(name, chance, processes), int(place)))
            place += chance.expovariate(1 / mean)
        runs.append(tuple(strikes))
    return Schedule(seed, processes, tuple(runs))


def spread(
    strikes: Sequence[Strike], commits: int, chance: random.Random | None = None
) -> tuple[Strike, ...]:
    """Have faults strike at nearly equal distances; the last one leaves room for a recovery."""
    width, placed = (commits - 1) / (len(strikes) + 1), []
    for number, strike in enumerate(strikes, 1):
        offset = chance.uniform(-width / 4, width / 4) if chance else 0.0
        commit = max(1, min(round(number * width + offset), commits - 2))
        placed.append(Strike(strike.fault, strike.rank, commit))
    return tuple(placed)


def load(path: Path) -> Schedule:
    """Read a stored schedule."""
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
        runs = tuple(tuple(Strike(**strike) for strike in run) for run in facts["runs"])
        return Schedule(int(facts["seed"]), int(facts["processes"]), runs)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError("--replay", f"'{path}' holds no schedule of a drill: {error}") from error


def _rank(fault: str, chance: random.Random, processes: int) -> int:
    # The first host of a lab has the supervisor, and rank 0 at the start: it is never cut off.
    first = 1 if fault == "host-cut-off" else 0
    return chance.randrange(first, processes)
