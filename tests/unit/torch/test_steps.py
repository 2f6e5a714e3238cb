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
from tests.integration.scalars import Run, read
from tests.unit.torch.jobs import network

INPUTS = torch.linspace(-1, 1, 15).view(5, 3)


def wrapped(model: torch.nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)


def joined(folder: Path, **attributes: Any) -> recover.TorchState:
    state = recover.TorchState(tensorboard=str(folder), **attributes)
    state.sync()
    return state


def backward(model: torch.nn.Module, optimizer: Any, factor: float = 1.0) -> float:
    """A forward and a backward pass; the norm of the gradients."""
    optimizer.zero_grad()
    (model(INPUTS).square().sum() * factor).backward()
    return norm(model)


def norm(model: torch.nn.Module) -> float:
    return math.sqrt(
        sum(float(each.grad.square().sum()) for each in model.parameters() if each.grad is not None)
    )


def run_of(state: recover.TorchState, folder: Path) -> Run:
    state.finish()
    return read(folder / "rank-0")


@pytest.mark.parametrize("kind", ["wrapped", "plain"])
def test_norms_and_times_of_each_step(tmp_path: Path, kind: str) -> None:
    model = network()
    optimizer = wrapped(model) if kind == "wrapped" else torch.optim.SGD(model.parameters(), lr=0.1)
    state = joined(tmp_path, model=model, optimizer=optimizer)
    expected = {}
    for step in (1, 2, 3):
        expected[step] = pytest.approx(backward(model, optimizer))
        optimizer.step()
    run = run_of(state, tmp_path)
    assert run.scalars["norm/averaged_gradient"] == expected
    assert run.steps["seconds/step"] == run.steps["seconds/allreduce_wait"] == [1, 2, 3]


def test_a_bad_step_that_the_guard_skips_is_seen(tmp_path: Path) -> None:
    model = network()
    optimizer = wrapped(model)
    state = joined(tmp_path, model=model, optimizer=optimizer, guard=recover.Guard(numerics="skip"))
    for factor in (1.0, float("nan"), 1.0):
        backward(model, optimizer, factor)
        optimizer.step()
    norms = run_of(state, tmp_path).scalars["norm/averaged_gradient"]
    assert [math.isfinite(norms[step]) for step in (1, 2, 3)] == [True, False, True]


def test_the_loss_keeps_no_graph_and_is_not_changed_later() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    kept = as_numbers(TorchFramework(), {"loss": loss})["loss"]
    loss.detach().fill_(7.0)
    assert (float(kept), kept.requires_grad) == (2.0, False)


def test_tensorboard_has_to_be_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hvdrecover.trackers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"^tensorboard: .*pip install"):
        recover.TorchState(tensorboard=str(tmp_path))
