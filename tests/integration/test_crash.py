"""A writer is SIGKILLed at any moment: nothing acknowledged is lost, and nothing lies about for ever."""

from __future__ import annotations

import itertools
import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from hvdrecover.checkpoint.commit_id import CommitId
from hvdrecover.checkpoint.manifest import FILE_NAME
from tests.integration.conftest import LONG
from tests.integration.crash_checks import check_opens, check_start
from tests.integration.crash_writer import Child, write_commits

NBYTES = 8 << 20  # of a commit's larger file: big enough that most moments lie within a write
KILLS, FRESH = 40, 15  # with LONG=1, 6 * (40 + 15) = 330 kills
SEEDS = [0, *(pytest.param(seed, marks=LONG) for seed in range(1, 6))]


@dataclass
class Durations:
    """Return how long, in seconds, a writer takes here and now: to start, and for one commit."""

    start: float
    commit: float


@pytest.fixture(scope="module")
def durations(tmp_path_factory: pytest.TempPathFactory) -> Durations:
    root = tmp_path_factory.mktemp("timing")
    times = [time.monotonic()]
    child = Child(write_commits, root, NBYTES)
    while child.hear() and len(child.acknowledged()) < 5:
        times.append(time.monotonic())
    child.kill()
    commits = [later - earlier for earlier, later in itertools.pairwise(times[2:])]
    return Durations(times[1] - times[0], sorted(commits)[len(commits) // 2])


def kill_at_random(root: Path, moment: random.Random, durations: Durations) -> Child:
    """Start a writer, and kill it at a random moment: while it starts, or during one of its first commits."""
    child = Child(write_commits, root, NBYTES)
    commits = moment.choice([-1, 0, 0, 1, 2])
    while commits >= 0 and not (child.told("claimed") and len(child.acknowledged()) >= commits):
        assert child.hear(), f"the writer went away: {child.heard}"
    time.sleep(moment.random() * (durations.start if commits < 0 else durations.commit))
    child.kill()
    return child


def is_unfinished(folder: Path) -> bool:
    return CommitId.parse(folder.name) is not None and not (folder / FILE_NAME).exists()


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_at_a_random_moment_a_writer_loses_nothing_acknowledged(
    tmp_path: Path, seed: int, durations: Durations
) -> None:
    moment = random.Random(seed)
    newest: CommitId | None = None
    claimed, within = 0, 0
    for number in range(KILLS):
        child = kill_at_random(tmp_path, moment, durations)
        within += any(map(is_unfinished, tmp_path.iterdir()))
        newest = max([*([newest] if newest else []), *child.acknowledged()], default=None)
        try:
            for generation in child.told("claimed"):
                assert generation > claimed
                claimed = generation
            found = check_opens(tmp_path, newest)
            if number % 4 == 3:
                check_start(tmp_path, newest)
                found = check_opens(tmp_path, found)
        except AssertionError as error:
            error.add_note(
                f"seed {seed}, kill {number} of a root; {sorted(path.name for path in tmp_path.iterdir())}"
            )
            raise
        newest = found
    assert within > 0, "no kill fell within a write"


@pytest.mark.parametrize("seed", SEEDS)
def test_killed_on_a_fresh_root_a_writer_leaves_one_that_a_later_start_can_use(
    tmp_path: Path, seed: int, durations: Durations
) -> None:
    moment = random.Random(1000 + seed)
    for number in range(FRESH):
        root = tmp_path / str(number)
        child = kill_at_random(root, moment, durations)
        try:
            check_start(root, max(child.acknowledged(), default=None))
        except AssertionError as error:
            error.add_note(f"seed {1000 + seed}, fresh root {number}")
            raise
