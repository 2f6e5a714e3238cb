"""What it costs to watch over the ranks: a step, and a commit, with and without a guard.

The module is also the worker: ``horovodrun -np 2 python -m benchmarks.topics.guard SIZE STATE FOLDER``.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdrecover.torch as recover
from benchmarks import workers
from benchmarks.measure import stopwatch
from benchmarks.rows import Fact, Goal, Row
from benchmarks.states import Setting, Training
from hvdrecover.examples.digits import digits
from hvdrecover.examples.torch_digits import network

_PATIENCE = 1100.0  # seconds
_RESULT = "guard.json"
_SUBJECTS = {"large": 1, "digits": 20}  # pairs; where one's objects happen to lie makes 1% of a short step
_STEPS = {"large": 60, "digits": 2000}  # of each pair; of fewer short ones in all, the median is off by 1%
_COMMITS = 20
_BATCH = {"large": 64, "digits": 16}  # samples; the digits example's default
_COMMIT_EVERY, _COMPARE_EVERY = 50, 10  # steps, and commits: the guard's default
_Batch = tuple[torch.Tensor, torch.Tensor]
_GOAL = Goal(0.01, 0.01, slowdown=True, digits=3)


def measure(setting: Setting) -> list[Row | Fact]:
    """Steps and commits of two real workers over loopback, with and without a guard by turns."""
    workers.run("benchmarks.topics.guard", setting, _PATIENCE)
    found = json.loads((setting.folder / _RESULT).read_text())
    title = setting.shape.title if setting.state == "large" else "digits example"
    peer = "the same without"
    steps, commits = found["steps"], found["commits"]
    return [
        Row("guard", "a training step with a guard", title, "ms", steps[0], peer, steps[1], _GOAL, True),
        Row("guard", "a commit at which ranks are compared", title, "ms", commits[0], peer, commits[1]),
        Fact(f"a guard at its defaults, {title}, a commit every {_COMMIT_EVERY} steps", _summary(found)),
    ]


def _summary(found: dict[str, Any]) -> str:
    """What all of it comes to, in parts of a step's time."""
    differences = [ours - theirs for ours, theirs in zip(*found["steps"], strict=True)]
    step, compared = (statistics.median(found[name][1]) for name in ("steps", "commits"))
    low, middle, high = (each / step for each in statistics.quantiles(differences, n=4))
    comparing = statistics.median(found["commits"][0]) - compared
    a_step = comparing / (_COMMIT_EVERY * _COMPARE_EVERY) / step
    with_look, without = map(statistics.median, found["sending"])
    spread = f"quartiles of the difference {low:+.1%} / {middle:+.1%} / {high:+.1%}"
    clocked = f"{(with_look - without) / step:+.2%} by the core's clock for looking at gradients"
    return f"{spread} in {len(differences)} pairs of steps, {clocked}, and {a_step:+.2%} for comparing"


class Subject:
    """A training with or without a guard.

    Args:
        setting: which.
        guard: the guard, or None.

    Attributes:
        sending: milliseconds of a core that this thread took to send gradients; with a guard, each is looked
            at then.
    """

    def __init__(self, setting: Setting, guard: recover.Guard | None) -> None:
        torch.manual_seed(1)
        large = setting.state == "large"
        self.model: Any = Training(setting.shape, trained=False).model if large else network()
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.AdamW(self.model.parameters()), named_parameters=self.model.named_parameters()
        )
        sampler = None if large else recover.ElasticSampler(_digits(), shuffle=True, seed=0)
        self._batches = _same(setting.shape.width) if sampler is None else self._epochs(sampler)
        self.state = recover.TorchState(self.model, self.optimizer, sampler=sampler, batch=0, guard=guard)
        self.state.sync()
        self.sending = 0.0
        self._send = self.optimizer._allreduce_grad_async
        self.optimizer._allreduce_grad_async = self._send_by_the_clock

    def _send_by_the_clock(self, parameter: torch.Tensor) -> Any:
        began = time.thread_time()  # Horovod's own threads, on the same cores, send others meanwhile
        handle = self._send(parameter)
        self.sending += 1e3 * (time.thread_time() - began)
        return handle

    def step(self) -> None:
        """Train on one batch, as the digits example does."""
        inputs, labels = next(self._batches)
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(inputs), labels).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.state.batch += 1

    def _epochs(self, sampler: recover.ElasticSampler) -> Iterator[_Batch]:
        loader = DataLoader(_digits(), batch_size=_BATCH["digits"], sampler=sampler)
        for epoch in itertools.count():
            sampler.set_epoch(epoch)
            for images, labels in loader:
                yield images, labels
                sampler.record_batch(self.state.batch, len(labels))


def _digits() -> TensorDataset:
    samples, _ = digits()
    return TensorDataset(torch.from_numpy(samples.images), torch.from_numpy(samples.labels))


def _same(width: int) -> Iterator[_Batch]:
    """One batch again and again; labels are of as many classes as there are features."""
    samples = _BATCH["large"]
    return itertools.repeat((torch.ones(samples, width), torch.zeros(samples, dtype=torch.int64)))


def work(setting: Setting) -> None:
    """On each worker: steps by turns, then commits by turns; rank 0 writes what they took."""
    hvd.init()
    torch.set_num_threads(1)  # as the example does: two ranks share two cores
    steps: list[list[float]] = [[], []]
    sending: list[list[float]] = [[], []]
    for first in range(setting.rounds(_SUBJECTS[setting.state])):
        subjects = _subjects(setting, first % 2)
        for number in range(setting.rounds(_STEPS[setting.state]) + 3):
            for place in (0, 1) if number % 2 else (1, 0):
                subjects[place].sending = 0.0
                taken = 1e3 * stopwatch(subjects[place].step)
                if number >= 3:  # the first ones are for warming up
                    steps[place].append(taken)
                    sending[place].append(subjects[place].sending)
    commits: list[list[float]] = [[], []]
    for number in range(setting.rounds(_COMMITS) + 2):
        for place, subject in enumerate(subjects):
            subject.step()
            taken = 1e3 * stopwatch(subject.state.commit)
            if number >= 2:
                commits[place].append(taken)
    if hvd.rank() == 0:
        found = {"steps": steps, "sending": sending, "commits": commits}
        (setting.folder / _RESULT).write_text(json.dumps(found))


def _subjects(setting: Setting, first: int) -> list[Subject]:
    """One with a guard and one without; ``first`` is made first."""
    made = {
        place: Subject(setting, None if place else recover.Guard(parameters_every_commits=1))
        for place in (first, 1 - first)
    }
    return [made[0], made[1]]


if __name__ == "__main__":
    work(Setting(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
