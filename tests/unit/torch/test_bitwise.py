"""A run that was killed and resumed ends with the bits of an undisturbed one, at every commit of a script."""

from __future__ import annotations

import random
import typing
from typing import Any, Literal

import numpy as np
import pytest
import torch

import hvdrecover.torch as recover
from hvdrecover.state.rank_local import Randomness
from tests.support import alone
from tests.unit.torch.jobs import Loading, Samples, bits, make_loader, state_of

pytestmark = pytest.mark.usefixtures("roots")

Place = Literal["set_epoch", "batch_begins", "batch_ends", "every_second_batch", "pass_ends", "epoch_ends"]
PLACES: tuple[Place, ...] = typing.get_args(Place)


class Killed(BaseException):
    """Ends a run as SIGKILL would: no handler of errors sees it."""


def run(
    root: str,
    kill_at: int | None = None,
    *,
    rng: Randomness = "reseed",
    places: tuple[Place, ...] = ("every_second_batch", "epoch_ends"),
    loading: Loading = "plain",
    samples: int = 10,
    batch_size: int = 4,
) -> tuple[dict[str, Any], int]:
    """Run a script that draws from every generator; return all that must be equal, and its commits."""
    alone.start()
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    layers = [torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.3), torch.nn.Linear(6, 1)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=40)
    # A batch that was fetched before a commit is fetched once more when a run resumes from it.
    augment = "batch_begins" not in places and loading == "plain"
    sampler = recover.ElasticSampler(Samples(samples, augment), seed=3)
    loader = make_loader(sampler, batch_size, loading)
    parts = {"scheduler": scheduler, "sampler": sampler, "epoch": 0, "batch": 0, "losses": [], "seen": []}
    state = recover.TorchState(model, optimizer, **parts, checkpoint=root, rng=rng)
    commits = 0

    def commit_at(place: Place) -> None:
        nonlocal commits
        if place in places:
            state.commit(durable=True)
            state.flush()
            commits += 1
            if commits == kill_at:
                raise Killed

    def step(index: Any, features: torch.Tensor, label: torch.Tensor) -> None:
        indices = np.atleast_1d(np.asarray(index)).tolist()
        features, label = features.view(-1, 4), label.view(-1, 1)
        noise = random.gauss(0, 0.1) + np.random.normal(0, 0.1)
        model.train(len(indices) > 1)  # batch statistics of one sample make no sense; nor does its dropout
        loss = torch.nn.functional.mse_loss(model(features + noise + 0.1 * torch.randn(4)), label)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        sampler.record_batch(state.batch, len(indices))
        state.seen += [[state.epoch, each] for each in indices]
        state.losses.append(loss.item())

    @recover.run
    def train(state: recover.TorchState) -> None:
        while state.epoch < 2:
            sampler.set_epoch(state.epoch)
            commit_at("set_epoch")
            for index, features, label in loader:
                commit_at("batch_begins")
                step(index, features, label)
                state.batch += 1
                commit_at("batch_ends")
                if state.batch % 2 == 0:
                    commit_at("every_second_batch")
            commit_at("pass_ends")
            state.epoch += 1
            commit_at("epoch_ends")

    train(state)
    return {
        "components": state_of(model, optimizer, scheduler, sampler),
        "counters": (state.epoch, state.batch),
        "losses": state.losses,
        "seen": state.seen,
        "draws": (random.random(), np.random.random(), bits(torch.rand(()))),
    }, commits


def kill_and_resume_at_every_commit(**options: Any) -> None:
    expected, commits = run("fake://undisturbed", **options)
    assert commits > 1
    assert len({tuple(each) for each in expected["seen"]}) == len(expected["seen"]) > 0
    for point in range(1, commits + 1):
        root = f"fake://killed-{point}"
        with pytest.raises(Killed):
            run(root, point, **options)
        assert run(root, **options)[0] == expected, point


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rng", ["reseed", "store"])
def test_killed_at_every_commit(place: Place, rng: Randomness) -> None:
    kill_and_resume_at_every_commit(places=(place,), rng=rng)


@pytest.mark.parametrize(
    ("loading", "options"),
    [
        ("no_batches", {"samples": 7, "batch_size": 3}),
        ("drop_last", {"samples": 7, "batch_size": 3}),
        ("batch_sampler", {"samples": 7, "batch_size": 3}),
        ("workers", {"samples": 8, "places": ("every_second_batch",)}),
        ("persistent_workers", {"samples": 8, "places": ("every_second_batch",), "rng": "store"}),
    ],
)
def test_killed_at_every_commit_however_samples_are_loaded(loading: Loading, options: dict[str, Any]) -> None:
    kill_and_resume_at_every_commit(loading=loading, **options)
