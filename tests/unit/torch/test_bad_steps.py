"""A look at gradients, in a job of one."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch

import hvdrecover.torch as recover
from hvdrecover.errors import ConfigError, NumericsError


def network() -> torch.nn.Sequential:
    return torch.nn.Sequential(
        torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Dropout(0.5), torch.nn.Linear(3, 1)
    )


def wrapped(model: torch.nn.Module, kind: Any = torch.optim.SGD, **options: Any) -> Any:
    parameters = kind(model.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(parameters, named_parameters=model.named_parameters(), **options)


def a_step(model: torch.nn.Module, optimizer: Any, factor: float = 1.0) -> None:
    optimizer.zero_grad()
    loss = model(torch.ones(4, 2) * factor).sum()
    loss.backward()
    optimizer.step()


def values(model: torch.nn.Module) -> list[Any]:
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_bad_step_is_applied_by_no_optimizer(kind: Any, by_hand: bool) -> None:
    model = network()
    optimizer = wrapped(model, kind)
    state = recover.TorchState(model, optimizer, guard=recover.Guard(numerics="skip"))
    state.sync()
    a_step(model, optimizer)
    before, slots = values(model), len(optimizer.state)
    if by_hand:
        optimizer.zero_grad()
        (model(torch.ones(4, 2)).sum() * float("nan")).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    else:
        a_step(model, optimizer, float("inf"))
    assert all(map(torch.equal, before, values(model)))
    assert len(optimizer.state) == slots
    model.load_state_dict({name: each.nan_to_num(0.5) for name, each in model.state_dict().items()})
    a_step(model, optimizer)
    assert not all(map(torch.equal, before, values(model)))


def test_large_gradients_are_applied() -> None:
    model = torch.nn.Linear(2, 1, bias=False)
    optimizer = wrapped(model)
    recover.TorchState(model, optimizer, guard=recover.Guard()).sync()
    a_step(model, optimizer, 1e30)
    assert float(model.weight.detach().abs().max()) > 1e28


def test_an_overflow_of_loss_scaling_is_no_fault() -> None:
    model = network()
    optimizer = wrapped(model)
    recover.TorchState(model, optimizer, guard=recover.Guard()).sync()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, 2)).sum() * factor).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1.0


def test_sparse_gradients_are_looked_at() -> None:
    model = torch.nn.EmbeddingBag(4, 2, sparse=True, mode="sum")
    optimizer = wrapped(model)
    recover.TorchState(model, optimizer, guard=recover.Guard()).sync()
    (model(torch.tensor([[1, 1]])).sum() * float("inf")).backward()
    with pytest.raises(NumericsError, match=r"gradient of model\.weight"):
        optimizer.step()


def test_an_optimizer_that_horovod_has_not_wrapped_is_left_alone() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recover.TorchState(model, optimizer, guard=recover.Guard()).sync()
    a_step(model, optimizer, float("nan"))
    assert not torch.isfinite(model[0].weight).all()


def test_adasum_has_no_common_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = wrapped(model)
    monkeypatch.setattr(optimizer, "_starting_models", {}, raising=False)
    with pytest.raises(ConfigError, match=r"^state\.optimizer: Adasum .*Guard\(numerics=None\)"):
        recover.TorchState(model, optimizer, guard=recover.Guard())
    recover.TorchState(model, optimizer, guard=recover.Guard(numerics=None))
