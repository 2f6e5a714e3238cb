"""A small training run that draws from every generator, for comparing runs to the last bit."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

import hvdrecover.torch as recover
from hvdrecover.state.random import Randomness
from tests.unit import alone
from tests.unit.torch.jobs import bits

Place = Literal["set_epoch", "batch_begins", "batch_ends", "every_second_batch", "pass_ends", "epoch_ends"]
Loading = Literal["plain", "no_batches", "drop_last", "batch_sampler", "workers", "persistent_workers"]


class Killed(BaseException):
    """Ends a run as SIGKILL would: no handler of errors sees it."""


class Samples(Dataset[Any]):
    """Features and a label, made from the index, and the index itself.

    Args:
        length: how many.
        augment: whether to add noise to the features.
    """

    def __init__(self, length: int, augment: bool = False) -> None:
        self.length = length
        self.augment = augment

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        features = torch.sin(torch.arange(1.0, 5.0) * (index + 1))
        if self.augment:
            features += 0.1 * torch.randn(4)
        return index, features, torch.tensor(index / self.length)


def make_loader(sampler: recover.ElasticSampler, batch_size: int, loading: Loading) -> DataLoader[Any]:
    dataset: Any = sampler.dataset
    match loading:
        case "no_batches":
            return DataLoader(dataset, batch_size=None, sampler=sampler)
        case "drop_last":
            return DataLoader(dataset, batch_size, sampler=sampler, drop_last=True)
        case "batch_sampler":
            return DataLoader(dataset, batch_sampler=BatchSampler(sampler, batch_size, drop_last=False))
        case "workers" | "persistent_workers":
            persistent = loading == "persistent_workers"
            return DataLoader(
                dataset,
                batch_size,
                sampler=sampler,
                num_workers=2,
                prefetch_factor=3,
                persistent_workers=persistent,
            )
    return DataLoader(dataset, batch_size, sampler=sampler)


def make_optimizer(name: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


@dataclass(frozen=True)
class Training:
    """A script; `start` runs it in what stands for a fresh process.

    Attributes:
        optimizer: ``sgd`` or ``adamw``.
        places: where it commits.
        loading: how samples are loaded.
        every_step: whether each step is a point at which it can be killed, and not only each commit.
        augment: whether samples are changed at random when they are loaded.
    """

    optimizer: str = "sgd"
    rng: Randomness = "reseed"
    places: tuple[Place, ...] = ("batch_ends",)
    loading: Loading = "plain"
    samples: int = 10
    batch_size: int = 4
    epochs: int = 2
    every_step: bool = False
    augment: bool = False

    def start(self, checkpoint: recover.Checkpoint | str | None, kill_at: int | None = None) -> Process:
        alone.start()
        process = Process(self, checkpoint, kill_at)
        process.run()
        return process

    def killed(self, checkpoint: recover.Checkpoint | str, kill_at: int) -> Process:
        """Start it, and have it killed at the given point."""
        process = Process(self, checkpoint, kill_at)
        try:
            process.run()
        except Killed:
            return process
        raise AssertionError(f"the run ended before point {kill_at}")


class Process:
    """The state of one process.

    Attributes:
        points: at how many points it could have been killed.
        seen: how often each sample of each epoch was trained on.
    """

    def __init__(
        self, training: Training, checkpoint: recover.Checkpoint | str | None, kill_at: int | None
    ) -> None:
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        self.training = training
        self.kill_at = kill_at
        self.points = 0
        self.seen: Counter[tuple[int, int]] = Counter()
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.3), torch.nn.Linear(6, 1)
        )
        self.optimizer = make_optimizer(training.optimizer, self.model)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.2, total_steps=40)
        self.sampler = recover.ElasticSampler(Samples(training.samples, training.augment), seed=3)
        self.loader = make_loader(self.sampler, training.batch_size, training.loading)
        self.state = recover.TorchState(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            sampler=self.sampler,
            epoch=0,
            batch=0,
            losses=[],
            checkpoint=checkpoint,
            rng=training.rng,
        )

    def run(self) -> None:
        recover.run(lambda state: self._train())(self.state)

    def final(self) -> dict[str, Any]:
        """All that must be equal, to the last bit, whatever has happened to a run."""
        return {
            "model": bits(self.model.state_dict()),
            "optimizer": bits(self.optimizer.state_dict()),
            "scheduler": self.scheduler.state_dict(),
            "sampler": self.sampler.state_dict(),
            "counters": (self.state.epoch, self.state.batch),
            "losses": self.state.losses,
            "draws": (random.random(), np.random.random(), torch.rand(()).item()),
        }

    def _train(self) -> None:
        state = self.state
        while state.epoch < self.training.epochs:
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
        self._point(self.training.every_step)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.sampler.record_batch(self.state.batch, len(indices))
        self.seen.update((self.state.epoch, each) for each in indices)
        self.state.losses.append(loss.item())

    def _commit_at(self, place: Place) -> None:
        if place in self.training.places:
            self.state.commit(durable=True)
            self.state.flush()
            self._point(True)

    def _point(self, possible: bool) -> None:
        if possible:
            self.points += 1
            if self.points == self.kill_at:
                raise Killed
