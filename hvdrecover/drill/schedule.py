"""The schedule of faults: decided by a seed, stored as JSON, and replayed exactly.

Faults strike at commits, not at times, so that a replay finds the same state on a faster or slower machine.
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

SPACE = 4  # commits between faults at least, so that a recovery has come to its end, and a standby is back


@dataclass(frozen=True)
class Strike:
    """One fault to come.

    Attributes:
        fault: its name.
        rank: whom it strikes, if it strikes one rank.
        commit: it strikes when so many commits have been made.
    """

    fault: str
    rank: int
    commit: int


@dataclass(frozen=True)
class Schedule:
    """The faults of a drill.

    Attributes:
        seed: what decided it.
        processes: number of ranks.
        runs: for each run of the script its faults, in order.
    """

    seed: int
    processes: int
    runs: tuple[tuple[Strike, ...], ...]


def each_once(names: Sequence[str], *, seed: int, processes: int, commits: int, repeat: int = 1) -> Schedule:
    """Have each fault strike once, in as few runs as leave room between them.

    Args:
        names: the faults.
        seed: of their order, their ranks and their commits.
        processes: number of ranks.
        commits: how many a run makes undisturbed.
        repeat: how often each strikes.
    """
    chance = random.Random(seed)
    order = [name for name in names for _ in range(repeat)]
    chance.shuffle(order)
    room = max(1, (commits - 1) // SPACE - 1)
    count = -(-len(order) // room)
    parts = [order[place::count] for place in range(count)]
    return Schedule(seed, processes, tuple(_spread(part, chance, processes, commits) for part in parts))


def at_random(
    names: Sequence[str],
    *,
    seed: int,
    processes: int,
    commits: int,
    mean: float,
    repeat: int = 1,
) -> Schedule:
    """Have faults strike at random, as often as faults do that know nothing of each other.

    Each strikes once before any strikes again, so that a long drill has had all of them.

    Args:
        names: the faults.
        seed: of all that is random.
        processes: number of ranks.
        commits: how many a run makes undisturbed.
        mean: commits between faults, on the average.
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
    """The same faults for the same ranks in another run, at equal distances.

    Args:
        strikes: for which a run was over too early.
        commits: how many a run makes undisturbed.
    """
    width = (commits - 1) / (len(strikes) + 1)
    return tuple(replace(strike, commit=max(1, round(n * width))) for n, strike in enumerate(strikes, 1))


def described(strikes: Sequence[Strike], size: int) -> str:
    """Return what is to strike when, and whom, in words.

    Args:
        strikes: faults of a run, in order.
        size: number of ranks.
    """
    words = []
    for strike in strikes:
        whom = FAULTS[strike.fault].whom(strike.rank, size)
        words.append(f"{strike.fault}{f' ({whom})' if whom else ''} at commit {strike.commit}")
    return ", ".join(words)


def _spread(names: Sequence[str], chance: random.Random, processes: int, commits: int) -> tuple[Strike, ...]:
    """Faults at distances that are alike but for a bit of chance; the last leaves room for a recovery."""
    width = (commits - 1) / (len(names) + 1)
    strikes = []
    for number, name in enumerate(names, 1):
        commit = round(number * width + chance.uniform(-width / 4, width / 4))
        strikes.append(Strike(name, chance.randrange(processes), max(1, min(commit, commits - 2))))
    return tuple(strikes)


def dumps(schedule: Schedule) -> str:
    """A schedule as JSON."""
    return json.dumps(asdict(schedule), indent=1) + "\n"


def load(path: Path) -> Schedule:
    """Read a stored schedule.

    Raises:
        ConfigError: there is none in this file.
    """
    try:
        facts: dict[str, Any] = json.loads(path.read_text())
        runs = tuple(tuple(Strike(**strike) for strike in run) for run in facts["runs"])
        return Schedule(int(facts["seed"]), int(facts["processes"]), runs)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError("--replay", f"'{path}' holds no schedule of a drill: {error}") from error
