"""Gradients of virtual ranks beside Horovod's: ``horovodrun -np 2 python -m … SIZE STATE FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

import hvdrecover.torch  # noqa: F401  (chooses Horovod's controller)
from benchmarks.measure import by_turns, stopwatch
from benchmarks.states import Setting
from hvdrecover.torch.virtual import Gradients
from hvdrecover.virtual.ranks import Counts, run_of

RESULT = "virtual.json"
_LAYERS, _WIDTH, _BATCH = 8, {"full": 1024, "small": 64}, {"full": 256, "small": 8}
_TENSORS, _SIDE = 25, {"full": 1000, "small": 50}  # 100 MB of float32


class Steps:
    """A model that computes for longer than its gradients take to be sent, and its training.

    Args:
        size: ``full`` or ``small``.
        shares: virtual ranks of each process; None to have no virtual ranks.
        passes: backward passes of a step without virtual ranks.
    """

    def __init__(self, size: str, shares: Counts | None, passes: int = 1) -> None:
        torch.manual_seed(1)
        width = _WIDTH[size]
        self._model = torch.nn.Sequential(
            *(
                layer
                for _ in range(_LAYERS)
                for layer in (torch.nn.Linear(width, width, bias=False), torch.nn.ReLU())
            )
        )
        self._inputs = torch.randn(_BATCH[size], width)
        self._shares, self._passes = shares, passes
        bare = torch.optim.SGD(self._model.parameters(), 1e-3)
        self._optimizer: Any = bare
        if shares is not None or hvd.size() > 1:
            self._optimizer = hvd.DistributedOptimizer(bare, self._model.named_parameters())
        if shares is not None:
            self._gradients = Gradients("optimizer", self._optimizer, sum(shares))

    def step(self) -> None:
        """Train on one batch of each virtual rank, or in each pass."""
        if self._shares is None:
            self._optimizer.zero_grad()
            for _ in range(self._passes):
                self._backward(self._passes)
        else:
            self._gradients.begin()
            for rank in run_of(self._shares, hvd.rank()):
                self._backward(1)
                self._gradients.part_ends(rank)
            self._gradients.finish(self._shares, hvd.rank())
        self._optimizer.step()

    def _backward(self, parts: int) -> None:
        loss = self._model(self._inputs).square().mean() / parts
        loss.backward()


class Reductions:
    """100 MB of gradients that are there already, as both ways reduce them.

    Args:
        size: ``full`` or ``small``.
        shares: virtual ranks of each process.
    """

    def __init__(self, size: str, shares: Counts) -> None:
        side = _SIDE[size]
        self._parameters = [torch.nn.Parameter(torch.zeros(side, side)) for _ in range(_TENSORS)]
        self._source = torch.randn(side, side)
        self._shares = shares
        self._gradients = Gradients(
            "-".join(map(str, shares)),
            hvd.DistributedOptimizer(torch.optim.SGD(self._parameters, 1e-3)),
            sum(shares),
        )

    def ours(self) -> float:
        """Seconds to reduce the gradients of the last part, and what the ones before have left."""
        self._gradients.begin()
        own = run_of(self._shares, hvd.rank())
        for rank in own:
            self._fill()
            if rank < own[-1]:
                self._gradients.part_ends(rank)
        hvd.barrier()

        def reduce() -> None:
            if own:
                self._gradients.part_ends(own[-1])
            self._gradients.finish(self._shares, hvd.rank())

        return stopwatch(reduce)

    def theirs(self) -> float:
        """Seconds of Horovod's."""
        self._fill()
        own = [each.grad for each in self._parameters]
        hvd.barrier()
        return stopwatch(lambda: hvd.synchronize(hvd.grouped_allreduce_async_(own, name="peer")))

    def _fill(self) -> None:
        for each in self._parameters:
            each.grad = self._source.clone()


def _measure(setting: Setting) -> dict[str, list[list[float]]]:
    """Seconds of both ways by turns."""
    found: dict[str, list[list[float]]] = {}
    for shares in ((1, 1), (1, 3), (3, 3)):
        both = Reductions(setting.size, shares)
        found["-".join(map(str, shares))] = by_turns(setting.rounds(15), [both.ours, both.theirs], warmups=2)
    steps = [Steps(setting.size, shares).step for shares in ((1, 1), None)]
    takes = [lambda step=step: stopwatch(step) for step in steps]  # type: ignore[misc]
    found["step"] = by_turns(setting.rounds(30), takes, warmups=2)
    return found


if __name__ == "__main__":
    chosen = Setting(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    hvd.init()
    torch.set_num_threads(1)
    values = _measure(chosen)
    if hvd.rank() == 0:
        (chosen.folder / RESULT).write_text(json.dumps(values))
