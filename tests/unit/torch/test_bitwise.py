"""A run that was killed and resumed ends with the bits of an undisturbed one, at every commit of a script."""

from __future__ import annotations

import random
import typing
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch

import hvdrecover.torch as recover
from hvdrecover.state.rank_local import Randomness
from tests.support import alone
from tests.unit.torch.jobs import Loading, Samples, bits, make_loader

pytestmark = pytest.mark.usefixtures("roots")

Place = Literal["set_epoch", "batch_begins", "batch_ends", "every_second_batch", "pass_ends", "epoch_ends"]
PLACES: tuple[Place, ...] = typing.get_args(Place)
COMMITS: tuple[Place, ...] = ("every_second_batch", "epoch_ends")


class Killed(BaseException):
    """Ends a run as SIGKILL would: no handler of errors sees it."""


@dataclass
class Process:
    """A script that draws from every generator, in what stands for a fresh process.

    Attributes:
        kill_at: at which commit it is killed.
        places: where it commits.
        points: how many commits it has made.
    """

    root: str | None
    kill_at: int | None = None
    rng: Randomness = "reseed"
    places: tuple[Place, ...] = COMMITS
    loading: Loading = "plain"
    samples: int = 10
    batch_size: int = 4

    def __post_init__(self) -> None:
        alone.start()
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        self.points = 0
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.3), torch.nn.Linear(6, 1)
        )
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.2, total_steps=40)
        # A batch that was fetched before a commit is fetched once more when a run resumes from it.
        augment = "batch_begins" not in self.places and self.loading == "plain"
        self.sampler = recover.ElasticSampler(Samples(self.samples, augment), seed=3)
        self.loader = make_loader(self.sampler, self.batch_size, self.loading)
        self.state = recover.TorchState(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            sampler=self.sampler,
            epoch=0,
            batch=0,
            losses=[],
            seen=[],
            checkpoint=self.root,
            rng=self.rng,
        )

    def run(self) -> Process:
        recover.run(lambda state: self._train())(self.state)
        return self

    def final(self) -> dict[str, Any]:
        """All that must be equal, to the last bit, whatever has happened to a run."""
        return {
            "model": bits(self.model.state_dict()),
            "optimizer": bits(self.optimizer.state_dict()),
            "scheduler": self.scheduler.state_dict(),
            "sampler": self.sampler.state_dict(),
            "counters": (self.state.epoch, self.state.batch),
            "losses": self.state.losses,
            "seen": self.state.seen,
            "draws": (random.random(), np.random.random(), torch.rand(()).item()),
        }

    def _train(self) -> None:
        state = self.state
        while state.epoch < 2:
            self.sampler.set_epoch(state.epoch)
            self._commit_at("set_epoch")
            for index, features, label in self.loader:
                self._commit_at("batch_begins")
                self._step(index, features, label)
                state.batch += 1
                self._commit_at("batch_ends")
                if state.batch % 2 == 0:
                    self._commit_at("every_second_batch")
            self._commit_at("pass_ends")
            state.epoch += 1
            self._commit_at("epoch_ends")

    def _step(self, index: Any, features: torch.Tensor, label: torch.Tensor) -> None:
        indices = np.atleast_1d(np.asarray(index)).tolist()
        features, label = features.view(-1, 4), label.view(-1, 1)
        noise = random.gauss(0, 0.1) + np.random.normal(0, 0.1)
        if len(indices) == 1:
            self.model.eval()  # batch statistics of one sample make no sense; nor does its dropout
        loss = torch.nn.functional.mse_loss(self.model(features + noise + 0.1 * torch.randn(4)), label)
        self.model.train()
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.sampler.record_batch(self.state.batch, len(indices))
        self.state.seen += [[self.state.epoch, each] for each in indices]
        self.state.losses.append(loss.item())

    def _commit_at(self, place: Place) -> None:
        if place in self.places:
            self.state.commit(durable=True)
            self.state.flush()
            self.points += 1
            if self.points == self.kill_at:
                raise Killed


def kill_and_resume_at_every_commit(**options: Any) -> None:
    undisturbed = Process("fake://undisturbed", **options).run()
    expected = undisturbed.final()
    assert undisturbed.points > 1
    assert len({tuple(each) for each in expected["seen"]}) == len(expected["seen"]) > 0
    for point in range(1, undisturbed.points + 1):
        root = f"fake://killed-{point}"
        with pytest.raises(Killed):
            Process(root, point, **options).run()
        assert Process(root, **options).run().final() == expected, point


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("rng", ["reseed", "store"])
def test_killed_at_every_commit(place: Place, rng: Randomness) -> None:
    kill_and_resume_at_every_commit(places=(place,), rng=rng)


@pytest.mark.parametrize(
    ("loading", "options"),
    [
        *(
            (loading, {"samples": 7, "batch_size": 3})
            for loading in ("no_batches", "drop_last", "batch_sampler")
        ),
        ("workers", {"samples": 8, "places": ("every_second_batch",)}),
        ("persistent_workers", {"samples": 8, "places": ("every_second_batch",), "rng": "store"}),
    ],
)
def test_killed_at_every_commit_however_samples_are_loaded(loading: Loading, options: dict[str, Any]) -> None:
    kill_and_resume_at_every_commit(loading=loading, **options)
