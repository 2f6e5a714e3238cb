"""Trains with virtual ranks whose parts are replayed, while bits of gradients are flipped.

::

    horovodrun -np 2 python replays.py REPORTS EPOCHS 'GUARD-AS-JSON' ...

Each process writes ``REPORTS/NUMBER-RANK.json`` for each guard. With ``"flips": N`` in it, one random bit of
one gradient is flipped in each of the first N steps, in a computation that is compared. An epoch is 51 steps.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdrecover.torch as recover
from hvdrecover.virtual.ranks import virtual_of
from hvdrecover.virtual.replay import plan

VIRTUAL, BATCH, SAMPLES, COMMIT_EVERY = 4, 4, 816, 5


class Script:
    """A training script whose processors make mistakes.

    Args:
        epochs: how many of them.
        flips: in how many steps.
        guard: the settings of the guard.
    """

    def __init__(self, epochs: int, flips: int, **guard: Any) -> None:
        self.epochs, self.flips = epochs, flips
        self.made: list[list[Any]] = []
        self.step = -1
        torch.manual_seed(1)
        random = np.random.default_rng(0)
        inputs = torch.from_numpy(random.normal(size=(SAMPLES, 8)).astype(np.float32))
        targets = inputs.clamp(-1, 1).sum(1, keepdim=True)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1)
        )
        self.parameters = dict(self.model.named_parameters())
        for name, each in self.parameters.items():
            each.register_hook(lambda gradient, name=name: self.strike(name, gradient))  # type: ignore[no-untyped-call]
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(self.model.parameters(), lr=0.01), named_parameters=self.model.named_parameters()
        )
        self.sampler = recover.ElasticSampler(TensorDataset(inputs, targets), seed=0)
        self.loader = DataLoader(self.sampler.dataset, batch_size=BATCH, sampler=self.sampler)
        self.state = recover.TorchState(
            self.model,
            self.optimizer,
            sampler=self.sampler,
            virtual_ranks=VIRTUAL,
            guard=recover.Guard(**guard) if guard else None,
            epoch=0,
            seen=recover.PerRank(0),
        )

    def strike(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Flip a bit of a gradient, if it is this one's turn."""
        ranks = virtual_of(self.state._session.context.ranks)
        checked = plan(self.state._session.own.random.seed, self.step, ranks.counts, 1.0, calibrate=False)
        assert checked is not None
        random = np.random.default_rng(self.step)
        process, tensor = random.choice([checked.owner, *checked.others]), random.choice([*self.parameters])
        mine = (process, tensor, checked.rank) == (hvd.rank(), name, ranks.rank())
        if self.step >= self.flips or not mine or any(step == self.step for step, *_ in self.made):
            return gradient
        flipped = gradient.clone()
        words = flipped.view(-1).numpy().view(np.uint32)
        words[random.integers(len(words))] ^= np.uint32(1 << random.integers(32))
        self.made.append([self.step, int(process), str(tensor), checked.rank])
        return flipped

    def train(self) -> None:
        state = self.state
        while state.epoch < self.epochs:
            self.sampler.set_epoch(state.epoch)
            for step in state.steps(self.loader):
                self.step += 1
                for inputs, targets in step:
                    loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
                    loss.backward()  # type: ignore[no-untyped-call]
                    state.seen.value += len(inputs)
                    state.log_metrics(loss=loss)
                self.optimizer.step()
                if self.step % COMMIT_EVERY == 0:
                    state.commit()
            state.epoch += 1
        state.commit()

    def outcome(self) -> dict[str, Any]:
        """Train, and tell what came of it."""
        found: dict[str, Any] = {"error": None}
        started = time.perf_counter()
        try:
            recover.run(lambda state: self.train())(self.state)
        except recover.OutOfStepError as error:
            found |= {"error": type(error).__name__, "text": str(error)}
        found["seconds"] = time.perf_counter() - started
        digest = hashlib.sha256()
        for each in [*self.model.state_dict().values(), *self.optimizer.state_dict()["state"].values()]:
            tensors = each.values() if isinstance(each, dict) else [each]
            for tensor in tensors:
                digest.update(tensor.numpy().tobytes())
        ranks = virtual_of(self.state._session.context.ranks)
        seen = {rank: self.state.seen.of(rank) for rank in ranks.carried.ranks}
        return {
            **found,
            "steps": self.step + 1,
            "digest": digest.hexdigest(),
            "seen": seen,
            "made": self.made,
        }


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    reports = Path(sys.argv[1])
    for number, words in enumerate(sys.argv[3:]):
        options = json.loads(words)
        outcome = Script(int(sys.argv[2]), options.pop("flips", 0), **options).outcome()
        (reports / f"{number}-{hvd.rank()}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
