"""Scripts for ``horovod.torch.elastic`` of which only the import line names us."""

from __future__ import annotations

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


def test_submodules_can_be_imported_as_horovods() -> None:
    code = """
from hvdrecover.torch.elastic import ElasticSampler, TorchState, init, run, shutdown
import hvdrecover.torch.elastic.sampler, hvdrecover.torch.elastic.state, horovod.torch
from hvdrecover.torch.elastic.state import ObjectState, StateHandler, get_handler_registry
print(ElasticSampler is hvdrecover.torch.elastic.sampler.ElasticSampler, init is horovod.torch.init)
"""
    assert answer(code) == "True True"
