"""Scripts for ``horovod.torch.elastic`` of which only the import line names us."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch

import hvdrecover.torch as hvd
from hvdrecover.torch import TorchState
from tests.support.processes import answer

URL = "fake://root"


def made(**attributes: Any) -> Any:
    model = torch.nn.Linear(1, 1)
    return hvd.elastic.TorchState(model, torch.optim.SGD(model.parameters(), lr=0.1), **attributes)


def test_it_is_a_torch_state_that_leaves_random_generators_alone() -> None:
    state = made(epoch=0)
    assert isinstance(state, TorchState)
    state.sync()
    streams = random.getstate(), torch.get_rng_state()
    state.epoch = 1
    state.commit()
    assert random.getstate() == streams[0]
    assert torch.equal(torch.get_rng_state(), streams[1])


class Scheduled(hvd.elastic.TorchState):
    """As users derive from Horovod's state: a scheduler that it takes care of."""

    def __init__(self, model: Any, optimizer: Any, schedule: Any, **attributes: Any) -> None:
        self.schedule = schedule
        super().__init__(model, optimizer, **attributes)
        self.save()

    def save(self) -> None:
        self._saved_schedule = copy.deepcopy(self.schedule.state_dict())
        super().save()

    def restore(self) -> None:
        self.schedule.load_state_dict(self._saved_schedule)
        super().restore()

    def sync(self) -> None:
        self.schedule.load_state_dict(self._bcast_object(self.schedule.state_dict()))
        self.save()
        super().sync()


def test_a_subclass_as_users_write_them_runs() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    state = Scheduled(model, optimizer, schedule, epoch=0)

    def train(state: Any) -> None:
        for state.epoch in range(state.epoch, 2):  # noqa: B020
            optimizer.step()
            state.schedule.step()
            state.commit()
        state.schedule.step()
        state.restore()

    hvd.elastic.run(train)(state)
    assert (state.schedule.last_epoch, state.epoch, optimizer.param_groups[0]["lr"]) == (2, 1, 0.25)


def test_submodules_can_be_imported_as_horovods() -> None:
    code = """
from hvdrecover.torch.elastic import ElasticSampler, TorchState, init, run, shutdown
import hvdrecover.torch.elastic.sampler, hvdrecover.torch.elastic.state, horovod.torch
from hvdrecover.torch.elastic.state import ObjectState, StateHandler, get_handler_registry
print(ElasticSampler is hvdrecover.torch.elastic.sampler.ElasticSampler, init is horovod.torch.init)
"""
    assert answer(code) == "True True"
