"""Parameters without a gradient: counted on each rank, and compared at each commit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from hvdrecover.guard.missing import Missing
from hvdrecover.state.hooks import Moment
from hvdrecover.torch import guard


class Rank:
    """A process that trains a model of two layers, of which it calls the first only."""

    def __init__(self, **options: Any) -> None:
        self._layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
        inner = torch.optim.SGD(self._layers.parameters(), lr=0.1)
        self._optimizer = hvd.DistributedOptimizer(inner, self._layers.named_parameters(), **options)
        self.missing = Missing(cast(Any, SimpleNamespace(world=None)))
        guard.report_missing({"model": self._layers, "optimizer": self._optimizer}, self.missing)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self._layers[0](torch.ones(1, 2)).sum().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

    def digest(self) -> int:
        (number,) = self.missing.numbers(Moment("commit"))
        return number

    def after(self, kind: str) -> None:
        """All ranks have had the same counts at a commit, or are at a rendezvous."""
        self.missing.verdict(Moment(cast(Any, kind)), np.array([[1], [1]]))


@pytest.fixture(autouse=True)
def elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's optimizers send gradients off, also in a job of one."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")


@pytest.mark.parametrize("options", [{}, {"groups": 2}])
def test_missing_gradients_are_counted_by_name(options: dict[str, Any]) -> None:
    rank = Rank(**options)
    rank.steps(3)
    assert rank.missing.steps == {"model.1.bias": 3, "model.1.weight": 3}


@pytest.mark.parametrize("kind", ["commit", "rendezvous"])
def test_a_rank_that_came_later_agrees_with_those_that_have_done_more_steps(kind: str) -> None:
    survivor, newcomer = Rank(), Rank()
    assert survivor.digest() == 0
    survivor.steps(3)
    assert survivor.digest() != 0
    survivor.after(kind)
    newcomer.after("rendezvous")
    for each in (survivor, newcomer):
        each.steps(2)
    assert survivor.digest() == newcomer.digest() != 0


def test_ranks_that_lack_gradients_in_more_steps_do_not_agree() -> None:
    one, other = Rank(), Rank()
    one.steps(1)
    other.steps(2)
    assert one.digest() != other.digest()
