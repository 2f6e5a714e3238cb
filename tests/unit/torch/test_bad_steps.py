"""A look at gradients and modules, in a job of one."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch

import hvdrecover.torch as recover
from hvdrecover.errors import ConfigError, NumericsError
from hvdrecover.torch.modules import Calls


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


# -- modules -----------------------------------------------------------------------------------------------


class Spoils(torch.nn.Module):
    def forward(self, values: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return values * factor


class Nested(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = network()
        self.spoils = Spoils()

    def forward(self, inputs: torch.Tensor, *, factor: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": self.spoils(self.first(inputs), factor).exp()}


def test_the_first_bad_output_is_found_and_nothing_is_changed() -> None:
    model = Nested()
    calls = Calls({"net": model})
    factor = torch.tensor([1e30])
    model(torch.rand(4, 2), factor=factor)
    factor[0] = float("inf")  # which the remembered call has as well
    state = {name: each.clone() for name, each in model.state_dict().items()}
    stream = torch.get_rng_state()
    assert calls.first_bad() == "the input of net"
    factor[0] = 1e38
    model.first[3].bias.data.fill_(1e38)
    state["first.3.bias"] = model.first[3].bias.detach().clone()
    assert calls.first_bad() == "the output of net.spoils (Spoils)"
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())


def test_what_is_finite_is_not_blamed() -> None:
    model = network()
    calls = Calls({"net": model})
    assert calls.first_bad() == ""
    model(torch.rand(3, 2))
    assert calls.first_bad() == ""


def test_a_call_that_cannot_be_made_again_is_no_error() -> None:
    class Once(torch.nn.Module):
        calls = 0

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls > 1:
                raise RuntimeError("only once")
            return inputs

    model = Once()
    calls = Calls({"net": model})
    model(torch.ones(2, 2))
    assert calls.first_bad() == ""


def test_calls_of_evaluations_are_not_remembered() -> None:
    model = network()
    calls = Calls({"net": model})
    model(torch.rand(3, 2))
    bad = torch.full((3, 2), torch.nan)
    model.eval()
    model(bad)
    model.train()
    with torch.no_grad():
        model(bad)
    assert calls.first_bad() == ""
