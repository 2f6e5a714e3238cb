"""A training of torch that may have a guard: ``horovodrun -np 2 python -m … SIZE STATE FOLDER``."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, TensorDataset

import hvdrecover.torch as recover
from benchmarks import states
from benchmarks.jobs.guarded import compare
from benchmarks.states import Setting
from hvdrecover.examples.digits import digits
from hvdrecover.examples.torch_digits import network

_BATCH = {"large": 64, "digits": 16}  # samples; the digits example's default
_Batch = tuple[torch.Tensor, torch.Tensor]


class Training:
    """See `benchmarks.jobs.guarded.Training`; with a guard, each gradient is looked at when it is sent."""

    def __init__(self, setting: Setting, guard: recover.Guard | None) -> None:
        torch.manual_seed(1)
        large = setting.state == "large"
        self.model: Any = states.Training(setting.shape, trained=False).model if large else network()
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
        """Train on one batch."""
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


if __name__ == "__main__":
    chosen = Setting(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    hvd.init()
    torch.set_num_threads(1)  # as the example does: two ranks share two cores
    compare(chosen, lambda guard: Training(chosen, guard), writes=hvd.rank() == 0)
