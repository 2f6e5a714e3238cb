"""Parameters without a gradient on all ranks, of which some were started later than others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import horovod.torch as hvd
import numpy as np
import pytest
import torch

from hvdrecover.elastic.companions import Moment
from hvdrecover.elastic.guard.missing import Missing
from hvdrecover.torch import missing_gradients


class Rank:
    """A process that trains a model of two layers, of which it calls the first only."""

    def __init__(self) -> None:
        layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
        self._called = layers[0]
        names = {id(each): name for name, each in layers.named_parameters()}
        self._optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(layers.parameters(), lr=0.1), layers.named_parameters()
        )
        self.missing = Missing(cast(Any, SimpleNamespace(world=None, events=None)), on=True)
        missing_gradients.watch({"optimizer": self._optimizer}, names, self.missing)

    def steps(self, number: int) -> None:
        for _ in range(number):
            self._called(torch.ones(1, 2)).sum().backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

    def after(self, kind: str) -> None:
        moment = Moment(cast(Any, kind))
        digests = np.array([[self.missing.digest]] * 2)
        self.missing.verdict(moment, digests)


@pytest.fixture(autouse=True)
def elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's optimizers send gradients off, also in a job of one."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")


@pytest.mark.parametrize("kind", ["commit", "rendezvous"])
def test_a_rank_that_came_later_agrees_with_those_that_have_done_more_steps(kind: str) -> None:
    survivor, newcomer = Rank(), Rank()
    survivor.steps(3)
    assert survivor.missing.digest
    survivor.after(kind)
    assert not survivor.missing.digest
    newcomer.after("rendezvous")
    for each in (survivor, newcomer):
        each.steps(2)
    assert survivor.missing.digest == newcomer.missing.digest != 0


def test_who_lacks_gradients_at_another_step_does_not_agree() -> None:
    one, other = Rank(), Rank()
    one.steps(1)
    other.steps(2)
    assert one.missing.digest != other.missing.digest
