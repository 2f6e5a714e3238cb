"""Times and gradient norms of torch's steps, in a job of one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch

import hvdrecover.torch as recover
from hvdrecover.errors import ConfigError
from hvdrecover.scalars import as_numbers
from hvdrecover.torch.framework import TorchFramework
from tests.integration.scalars import read
from tests.unit.torch.jobs import network

INPUTS = torch.linspace(-1, 1, 15).view(5, 3)


@pytest.mark.parametrize("kind", ["wrapped", "plain"])
def test_each_step_has_its_norm_and_times_also_one_that_the_guard_skips(tmp_path: Path, kind: str) -> None:
    model = network()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "wrapped":
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    guard = recover.Guard(numerics="skip")
    state = recover.TorchState(model, optimizer, guard=guard, tensorboard=str(tmp_path))
    state.sync()
    expected = {}
    for step, factor in enumerate([1.0, math.nan if kind == "wrapped" else 2.0, 3.0], 1):
        optimizer.zero_grad()
        (model(INPUTS).square().sum() * factor).backward()
        gradients = torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])
        expected[step] = pytest.approx(gradients.norm().item(), nan_ok=True)
        optimizer.step()
    state.finish()
    run = read(tmp_path / "rank-0")
    assert run.scalars["norm/averaged_gradient"] == expected
    assert run.steps["seconds/step"] == run.steps["seconds/allreduce_wait"] == [1, 2, 3]


def test_the_loss_keeps_no_graph_and_is_not_changed_later() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    kept = as_numbers(TorchFramework(), {"loss": loss})["loss"]
    loss.detach().fill_(7.0)
    assert (float(kept), kept.requires_grad) == (2.0, False)


def test_tensorboard_has_to_be_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hvdrecover.trackers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^tensorboard: .*pip install"):
        recover.TorchState(tensorboard=str(tmp_path))
