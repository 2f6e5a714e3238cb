"""A run that was disturbed ends with the very bits of one that was not."""

from __future__ import annotations

from typing import Any

import pytest

from hvdrecover.state.random import Randomness
from tests.fakes.world import Action, FakeJob, FakeWorld, Replacement, fail_at
from tests.unit.state.training import Training

RANKS = 2


def undisturbed(**options: Any) -> list[Any]:
    return FakeJob(Training(**options), RANKS).results()


def visits(training: Training) -> int:
    """Return how many collectives each rank of an undisturbed run comes to."""
    worlds: list[FakeWorld] = []

    def main(world: FakeWorld) -> Any:
        worlds.append(world)
        return training(world)

    FakeJob(main, RANKS).results()
    return worlds[0].visits


@pytest.mark.parametrize("replacement", ["in_place", "appended"])
@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("commit_every", [1, 2, 3])
def test_a_rank_killed_at_any_collective(replacement: Replacement, rank: int, commit_every: int) -> None:
    expected = undisturbed(commit_every=commit_every)
    for nth in range(1, visits(Training(commit_every=commit_every)) + 1):
        fault = fail_at(rank, "", nth, replacement=replacement)
        assert FakeJob(Training(commit_every=commit_every), RANKS, [fault]).results() == expected, nth


@pytest.mark.parametrize("action", ["kill_after", "cut"])
@pytest.mark.parametrize("rank", range(RANKS))
def test_a_rank_lost_right_after_any_collective(action: Action, rank: int) -> None:
    expected = undisturbed()
    for nth in range(1, visits(Training())):  # after the last one nobody would notice
        replacement: Replacement = "none" if action == "cut" else "in_place"
        fault = fail_at(rank, "", nth, action=action, replacement=replacement)
        assert FakeJob(Training(), RANKS, [fault]).results() == expected, nth


@pytest.mark.parametrize("action", ["kill", "kill_after", "cut"])
@pytest.mark.parametrize("rank", range(RANKS))
def test_the_users_own_streams_when_a_rank_is_lost_at_any_collective(action: Action, rank: int) -> None:
    expected = undisturbed(rng="store")
    replacement: Replacement = "none" if action == "cut" else "in_place"
    for nth in range(1, visits(Training(rng="store")) + (action == "kill")):
        fault = fail_at(rank, "", nth, action=action, replacement=replacement)
        assert FakeJob(Training(rng="store"), RANKS, [fault]).results() == expected, nth


@pytest.mark.parametrize(("rng", "flush"), [("reseed", False), ("reseed", True), ("store", True)])
@pytest.mark.parametrize("commit_every", [1, 2, 3])
def test_the_whole_job_killed_at_any_collective(rng: Randomness, commit_every: int, flush: bool) -> None:
    options: dict[str, Any] = {"rng": rng, "commit_every": commit_every, "flush": flush}
    expected = undisturbed(checkpoint="fake://undisturbed", **options)
    for nth in range(1, visits(Training("fake://counted", **options)) + 1):
        training = Training(f"fake://killed-{nth}", **options)
        FakeJob(training, RANKS, [fail_at(nth % RANKS, "", nth, action="kill_all")]).run()
        assert FakeJob(training, RANKS).results() == expected, nth


def test_killed_again_and_again_both_ways() -> None:
    expected = undisturbed(checkpoint="fake://undisturbed")
    training = Training("fake://root")
    for nth in (3, 4, 5):
        faults = [
            fail_at(0, "gradient", 1, replacement="in_place"),
            fail_at(1, "gradient", 2, replacement="appended"),
            fail_at(0, "gradient", nth, action="kill_all"),
        ]
        FakeJob(training, RANKS, faults).run()
    assert FakeJob(training, RANKS).results() == expected
