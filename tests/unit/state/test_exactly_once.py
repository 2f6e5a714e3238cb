"""Every sample of an epoch is in exactly one committed batch, whatever happens to the ranks."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.fakes.world import FakeJob, Fault, change_at, fail_at
from tests.support.ledger import committed
from tests.unit.state.training import Training

SAMPLES = 48


def training(checkpoint: str | None) -> Training:
    return Training(checkpoint, commit_every=2, check_every=3, samples=SAMPLES, epochs=2, batch_size=1)


def seen(script: Training) -> list[Counter[int]]:
    """Return how often each sample is in a committed batch, for each epoch."""
    batches = committed(script.batches, script.starts)
    return [
        Counter(index for batch in batches if batch.epoch == epoch for index in batch.indices)
        for epoch in range(script.epochs)
    ]


def assert_exactly_once(script: Training) -> None:
    """Each sample once, but for those that the last round of an epoch repeats: fewer than there are ranks."""
    largest = max(batch.size for batch in script.batches)
    for counts in seen(script):
        assert sorted(counts) == list(range(SAMPLES))
        repeated = {index: count for index, count in counts.items() if count > 1}
        assert sum(repeated.values()) - len(repeated) < largest, repeated


def fault(chance: random.Random, step: int) -> Fault:
    """A fault at about a step. It costs at most one rank."""
    kind = chance.choice(["lost", "replaced", "cut", "added", "removed"])
    rank = chance.randrange(2)
    if kind == "added":
        made = change_at(rank, "gradient", step, add=1, ahead=chance.random() < 0.3)
    elif kind == "removed":
        made = change_at(rank, "gradient", step, remove=[0])
    elif kind == "cut":
        made = fail_at(rank, "gradient", step, action="cut")
    else:
        made = fail_at(rank, "gradient", step)
        made.replacement = "none" if kind == "lost" else chance.choice(["in_place", "appended"])
    made.optional = True  # the job may be over, or have only one rank left
    return made


def story(seed: int) -> tuple[int, list[Fault]]:
    """A number of ranks, and faults that leave at least one of them."""
    chance = random.Random(seed)
    size = chance.randint(2, 4)
    return size, [fault(chance, chance.randint(1, 14)) for _ in range(size - 1)]


def test_an_undisturbed_run_sees_each_sample_once() -> None:
    script = training(None)
    FakeJob(script, 3).results()
    assert seen(script) == [Counter(range(SAMPLES))] * 2


def test_a_batch_that_was_lost_with_a_rank_does_not_count() -> None:
    script = training(None)
    FakeJob(script, 2, [fail_at(1, "gradient", 6)]).results()
    assert len(script.batches) > len(committed(script.batches, script.starts))
    assert seen(script) == [Counter(range(SAMPLES))] * 2


@pytest.mark.parametrize("seed", range(25))
def test_ranks_that_come_and_go(seed: int) -> None:
    size, faults = story(seed)
    script = training(None)
    FakeJob(script, size, faults).results()
    assert_exactly_once(script)


@pytest.mark.parametrize("seed", range(25))
def test_ranks_that_come_and_go_and_jobs_that_are_killed(seed: int) -> None:
    chance = random.Random(seed)
    script = training(f"fake://{seed}")
    script.flush = chance.random() < 0.5
    for size in (2, 3):
        _, faults = story(seed * 100 + size)
        last = fail_at(0, "gradient", chance.randint(6, 14), action="kill_all")
        last.optional = True
        FakeJob(script, size, [*faults[:1], last]).run()
        script.job += 1
    FakeJob(script, chance.randint(1, 3)).results()
    assert_exactly_once(script)
