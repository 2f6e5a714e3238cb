"""The reports of an optimizer's steps, and the scalars made of them, in a job of one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import hvdrecover.torch as recover
from hvdrecover.errors import ConfigError
from hvdrecover.scalars import as_numbers
from hvdrecover.torch.framework import TorchFramework
from hvdrecover.torch.stepping import steps_of
from hvdrecover.torch.virtual import Gradients
from tests.integration.scalars import read
from tests.unit.torch.jobs import end_allreduces, network, wrapped

KINDS = ["plain", "wrapped", "wrapped, without hooks"]
INSIDE = ["averaging", "averaged"]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[torch.nn.Module, Any]]:
    """Makes models and their optimizers; Horovod's send gradients off as in an elastic job, or do not."""

    def make(kind: str) -> tuple[torch.nn.Module, Any]:
        model = network()
        if kind == "plain":
            return model, torch.optim.SGD(model.parameters(), lr=0.1)
        with monkeypatch.context() as elastic:
            elastic.setenv("HOROVOD_ELASTIC", "1" if kind == "wrapped" else "")
            return model, wrapped(model)

    return make


def log_of(optimizer: Any) -> list[str]:
    """Return a list that fills with the reports of an optimizer from now on."""
    log: list[str] = []
    for name in ("begins", "averaging", "averaged", "applying", "ended"):
        getattr(steps_of(optimizer), name).append(lambda name=name: log.append(name))
    return log


def backward(model: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()


def fail() -> None:
    raise RuntimeError("a rank was lost")


@pytest.mark.parametrize("kind", KINDS[1:])
def test_gradients_that_the_script_averages(kind: str, make: Any) -> None:
    model, optimizer = make(kind)
    log = log_of(optimizer)
    for _ in range(2):
        backward(model, optimizer)
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    assert log == [*INSIDE, "begins", "applying", "ended"] * 2


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        *itertools.product(KINDS, ["begins", "applying"]),
        *itertools.product(KINDS[1:], INSIDE),
    ],
)
def test_a_step_after_one_that_failed_is_told_of_as_any(kind: str, where: str, make: Any) -> None:
    model, optimizer = make(kind)
    backward(model, optimizer)
    log, steps = log_of(optimizer), steps_of(optimizer)
    getattr(steps, where).insert(0, fail)
    with pytest.raises(RuntimeError, match="a rank was lost"):
        optimizer.step()
    getattr(steps, where).remove(fail)
    end_allreduces(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())  # as going back does; handles are forgotten
    log.clear()
    for _ in range(2):
        backward(model, optimizer)
        optimizer.step()
    assert log == ["begins", *(INSIDE if kind != "plain" else ()), "applying", "ended"] * 2


def test_an_optimizer_that_was_wrapped_before_the_import_is_refused(make: Any) -> None:
    _, optimizer = make("wrapped")
    del type(optimizer).forget_parameter  # as Horovod's own classes have none
    with pytest.raises(ConfigError, match=r"import hvdrecover\.torch at the top"):
        steps_of(optimizer)


def test_virtual_ranks_average_also_what_others_were_told_of_before(make: Any) -> None:
    model, optimizer = make("wrapped")
    log = log_of(optimizer)
    gradients = Gradients("optimizer", optimizer, 1)
    gradients.begin()
    model(torch.ones(2, 3)).sum().backward()
    gradients.part_ends(0)
    gradients.finish([1], 0)
    optimizer.step()
    assert log == [*INSIDE, "begins", "applying", "ended"]


# -- times and gradient norms --------------------------------------------------------------------------------


INPUTS = torch.linspace(-1, 1, 15).view(5, 3)


@pytest.mark.parametrize("kind", ["wrapped", "plain"])
def test_each_step_has_its_norm_and_times_also_one_that_the_guard_skips(tmp_path: Path, kind: str) -> None:
    model = network()
    optimizer = wrapped(model) if kind == "wrapped" else torch.optim.SGD(model.parameters(), lr=0.1)
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
