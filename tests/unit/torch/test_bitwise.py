"""A run that was killed and resumed ends with the very bits of one that was not."""

from __future__ import annotations

import typing

import pytest

from hvdrecover.state.random import Randomness
from tests.unit.torch.training import Loading, Place, Training

pytestmark = pytest.mark.usefixtures("roots")

BOTH: list[tuple[str, Randomness]] = [("sgd", "reseed"), ("adamw", "store")]
PLACES: tuple[Place, ...] = typing.get_args(Place)


def kill_and_resume_at_every_point(training: Training) -> None:
    undisturbed = training.start("fake://undisturbed")
    expected = undisturbed.final()
    assert undisturbed.points > 1
    for point in range(1, undisturbed.points + 1):
        root = f"fake://killed-{point}"
        training.killed(root, point)
        assert training.start(root).final() == expected, point


def test_the_run_is_long_enough_to_tell_something() -> None:
    process = Training("adamw").start(None)
    assert len(process.state.losses) == 6
    assert process.seen == {(epoch, index): 1 for epoch in range(2) for index in range(10)}
    # Where commits are matters with "reseed" only.
    elsewhere = Training("adamw", places=("every_second_batch",)).start(None)
    assert elsewhere.final()["model"] != process.final()["model"]


def test_the_users_own_streams_do_not_depend_on_commits() -> None:
    finals = [
        Training(rng="store", places=places).start(None).final() for places in ((), ("every_second_batch",))
    ]
    assert finals[0] == finals[1]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rng", ["reseed", "store"])
def test_killed_at_every_commit(place: Place, rng: Randomness) -> None:
    kill_and_resume_at_every_point(Training("adamw", rng, (place,), augment=True))


def test_killed_at_every_commit_of_several_in_a_row() -> None:
    """Two commits without a change in between are two in an undisturbed run, and one if resumed."""
    kill_and_resume_at_every_point(Training("sgd", "reseed", PLACES))


@pytest.mark.parametrize(("optimizer", "rng"), BOTH)
def test_killed_in_every_step_between_commits(optimizer: str, rng: Randomness) -> None:
    training = Training(optimizer, rng, ("every_second_batch", "epoch_ends"), every_step=True)
    kill_and_resume_at_every_point(training)


@pytest.mark.parametrize("loading", ["no_batches", "drop_last", "batch_sampler"])
def test_killed_at_every_commit_however_samples_are_loaded(loading: Loading) -> None:
    training = Training(
        "adamw", "reseed", ("every_second_batch", "epoch_ends"), loading, samples=7, batch_size=3
    )
    kill_and_resume_at_every_point(training)


@pytest.mark.parametrize(("rng", "loading"), [("reseed", "workers"), ("store", "persistent_workers")])
def test_killed_in_mid_epoch_while_workers_prefetch(rng: Randomness, loading: Loading) -> None:
    training = Training("adamw", rng, ("every_second_batch",), loading)
    expected = training.start("fake://undisturbed").final()
    for point in (1, 2):
        training.killed(f"fake://killed-{point}", point)
        assert training.start(f"fake://killed-{point}").final() == expected, point


@pytest.mark.parametrize(("optimizer", "rng"), BOTH)
def test_killed_at_every_commit_of_one_root_in_turn(optimizer: str, rng: Randomness) -> None:
    training = Training(optimizer, rng, ("batch_ends", "epoch_ends"))
    expected = training.start("fake://undisturbed").final()
    for _ in range(7):
        training.killed("fake://root", 1)  # the first commit after it was resumed
    assert training.start("fake://root").final() == expected


@pytest.mark.parametrize("loading", ["plain", "no_batches", "drop_last", "batch_sampler"])
def test_each_sample_is_in_one_committed_batch(loading: Loading) -> None:
    training = Training("sgd", "reseed", ("batch_ends",), loading, samples=7, batch_size=3)
    undisturbed = training.start("fake://undisturbed")
    for point in range(1, undisturbed.points + 1):
        killed = training.killed(f"fake://killed-{point}", point)
        assert killed.seen + training.start(f"fake://killed-{point}").seen == undisturbed.seen, point
