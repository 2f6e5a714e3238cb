"""The reports of an optimizer's steps, in a job of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import horovod.torch as hvd
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from hvdrecover import heartbeat
from hvdrecover.errors import ConfigError
from hvdrecover.torch import stepping
from hvdrecover.torch.stepping import steps_of
from hvdrecover.torch.virtual_gradients import Gradients
from tests.unit.torch.jobs import network

KINDS = ["plain", "wrapped", "wrapped, without hooks"]
INSIDE = ["averaging", "averaged"]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[torch.nn.Module, Any]]:
    """Makes models and their optimizers; Horovod's send gradients off as in an elastic job, or do not."""

    def make(kind: str) -> tuple[torch.nn.Module, Any]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if kind == "plain":
            return model, optimizer
        with monkeypatch.context() as elastic:
            elastic.setenv("HOROVOD_ELASTIC", "1" if kind == "wrapped" else "")
            return model, hvd.DistributedOptimizer(optimizer, model.named_parameters())

    return make


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A guardian seems to watch this process."""
    monkeypatch.setattr(heartbeat, "watched", lambda: True)
    handle = register_optimizer_step_post_hook(stepping._beat)
    heartbeat.stand_at(0, 0, 0)
    yield
    handle.remove()
    heartbeat.stand_at(0, 0, 0)


def log_of(optimizer: Any) -> list[str]:
    """Return a list that fills with the reports of an optimizer from now on."""
    log: list[str] = []
    for name in ("begins", "averaging", "averaged", "applying", "ended"):
        getattr(steps_of(optimizer), name).append(lambda name=name: log.append(name))
    return log


def backward(model: torch.nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()


def end_allreduces(optimizer: Any) -> None:
    """No allreduce is in flight any more; the optimizer does not know."""
    for handle, _ in getattr(optimizer, "_handles", {}).values():
        hvd.synchronize(handle)


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_is_told_of_once(kind: str, make: Any) -> None:
    model, optimizer = make(kind)
    log = log_of(optimizer)
    for _ in range(3):
        backward(model, optimizer)
        optimizer.step()
        log.append("-")
    expected = ["begins", *(INSIDE if kind != "plain" else ()), "applying", "ended", "-"]
    assert log == expected * 3


def test_an_optimizer_that_was_wrapped_before_the_import_is_refused(make: Any) -> None:
    _, optimizer = make("wrapped")
    del type(optimizer).reports_steps  # as Horovod's own classes have none
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


@pytest.mark.parametrize("change", ["added", "unfrozen"])
def test_parameters_that_come_later_are_refused(change: str, make: Any) -> None:
    model, optimizer = make("wrapped")
    backward(model, optimizer)
    optimizer.step()
    later = torch.nn.Parameter(torch.zeros(7))
    optimizer.add_param_group({"params": [later]})
    if change == "unfrozen":
        later.requires_grad_(False)
        backward(model, optimizer)
        optimizer.step()
        later.requires_grad_()
    backward(model, optimizer)
    with pytest.raises(ConfigError, match=r"^DistributedOptimizer: .*\(7,\) .*freeze them afterwards"):
        optimizer.step()
    end_allreduces(optimizer)


def test_a_closure_is_refused(make: Any) -> None:
    with pytest.raises(ConfigError, match=r"^optimizer\.step\(closure\): .*backward\(\), and then step\(\)"):
        make("wrapped")[1].step(lambda: None)


def test_frozen_parameters_are_not_moved(make: Any) -> None:
    optimizer = make("wrapped")[1]
    frozen = optimizer.param_groups[0]["params"][0].requires_grad_(False)
    before = frozen.clone()
    optimizer.step()
    assert frozen.grad is None
    assert torch.equal(frozen, before)


# -- those that are told -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize("kind", KINDS)
def test_a_guardian_counts_each_step_once(kind: str, make: Any) -> None:
    model, optimizer = make(kind)
    for step in range(3):
        backward(model, optimizer)
        optimizer.step()
        assert heartbeat.steps() == step + 1
