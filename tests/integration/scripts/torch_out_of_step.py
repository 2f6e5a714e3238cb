"""Ranks that fall out of step, in one way after the other.

::

    horovodrun -np 2 python torch_out_of_step.py REPORTS 'FAULT GUARD-AS-JSON' ...

Each rank writes ``REPORTS/NUMBER-RANK.json`` for each fault: what came of it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdrecover.torch as recover

SAMPLES, BATCH, EPOCHS, COMMIT_EVERY = 96, 4, 2, 2
BAD_SAMPLE = 37
LARGE = 17_000_000  # float32 numbers, more than float32 can count
AT_STEP = 6  # right before a commit


class Part(torch.nn.Module):
    """A layer that is left out on some ranks."""

    def __init__(self, called: bool) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(16, 16)
        self.called = called

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.inner(values) if self.called else values


class Ballast(torch.nn.Module):
    """Many parameters that cost little time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(LARGE))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.weight.mean()


class Script:
    def __init__(self, fault: str, guard: dict[str, Any]) -> None:
        self.fault = fault
        self.odd = hvd.rank() == (0 if fault.endswith("_0") else hvd.size() - 1)
        torch.manual_seed(1)
        self.model = self.network()
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(self.model.parameters(), lr=0.02 if self.has("rate") else 0.01),
            named_parameters=self.model.named_parameters(),
        )
        self.sampler = recover.ElasticSampler(self.data(), seed=int(self.has("seed")))
        self.loader = DataLoader(self.sampler.dataset, batch_size=BATCH, sampler=self.sampler)
        self.steps = 0
        self.strikes = 2 if fault.startswith("flip_twice") else 1
        self.state = recover.TorchState(
            self.model,
            self.optimizer,
            guard=None if self.has("guard") else recover.Guard(**guard),
            sampler=self.sampler,
            step=0,
            epoch=0,
        )

    def has(self, fault: str) -> bool:
        return self.odd and self.fault.startswith(fault)

    def network(self) -> torch.nn.Module:
        layers = [torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 1)]
        if self.has("layer"):
            del layers[3]
        if self.fault == "flip_in_many":
            layers.append(Ballast())
        if self.fault.startswith("missing"):
            layers.insert(1, Part(called=not self.odd))
        return torch.nn.Sequential(*layers)

    def data(self) -> TensorDataset:
        random = np.random.default_rng(0)
        inputs = torch.from_numpy(random.normal(size=(SAMPLES, 8)).astype(np.float32))
        if self.fault == "nan":
            inputs[BAD_SAMPLE] = float("nan")
        targets = inputs.nan_to_num(0.0).clamp(-10, 10).sum(1, keepdim=True)
        return TensorDataset(inputs, targets, torch.arange(SAMPLES))

    def strike(self) -> None:
        """Do to this rank's weights what its fault says."""
        if self.strikes and self.state.step >= AT_STEP and (self.has("flip") or self.has("poison")):
            self.strikes -= 1
            weights = self.model[-1].weight.detach().view(-1)
            if self.has("poison"):
                weights[5] = float("nan")
            else:
                weights.numpy().view(np.uint32)[len(weights) // 3] ^= 1

    def train(self) -> None:
        state = self.state
        while state.epoch < EPOCHS:
            self.sampler.set_epoch(state.epoch)
            for inputs, targets, _ in self.loader:
                self.optimizer.zero_grad()
                torch.nn.functional.mse_loss(self.model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
                self.sampler.record_batch(state.step, len(inputs))
                self.steps += 1
                state.step += 1
                self.strike()
                if state.step % COMMIT_EVERY == 0:
                    state.commit()
            state.epoch += 1

    def outcome(self) -> dict[str, Any]:
        found: dict[str, Any] = {"error": None}
        try:
            recover.run(lambda state: self.train())(self.state)
            found["updates"] = int(self.optimizer.state[self.model[0].weight]["step"])
        except (recover.OutOfStepError, recover.NumericsError) as error:
            found |= {"error": type(error).__name__, "text": str(error)}
        found["steps"] = self.steps
        small = [each.detach().numpy() for each in self.model.parameters() if each.numel() < LARGE]
        found["weights"] = [each.tobytes().hex() for each in small]
        found["left_out"] = self.sampler.state_dict().get("left_out")
        return found


def main() -> None:
    torch.set_num_threads(1)
    hvd.init()
    reports = Path(sys.argv[1])
    for number, words in enumerate(sys.argv[2:]):
        fault, _, guard = words.partition(" ")
        outcome = Script(fault, json.loads(guard or "{}")).outcome()
        (reports / f"{number}-{hvd.rank()}.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
