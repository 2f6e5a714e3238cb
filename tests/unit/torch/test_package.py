"""The public names of the adapter, their examples, and scripts of which only the import line names us."""

from __future__ import annotations

import doctest
import random

import horovod.torch as hvd
import numpy as np
import pytest
import torch

import hvdrecover.torch as recover
from tests.support.commands import answer
from tests.unit import api

PACKAGES = ("hvdrecover", "hvdrecover.torch")
SHOWN = [(each, name) for each in PACKAGES for name in api.names(each) if api.examples(each, name)]


@pytest.mark.parametrize(("package", "name"), SHOWN)
def test_an_example_does_what_it_says(package: str, name: str) -> None:
    names = {"hvd": hvd, "np": np, "recover": recover, "torch": torch}
    found = doctest.DocTest(api.examples(package, name), names, name, None, None, None)
    assert doctest.DocTestRunner().run(found).failed == 0


def test_the_state_of_elastic_scripts_leaves_random_generators_alone() -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = recover.elastic.TorchState(model, optimizer, epoch=0)
    assert isinstance(state, recover.TorchState)
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
