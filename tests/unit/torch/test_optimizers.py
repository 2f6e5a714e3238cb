from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hvdrecover.errors import MismatchError
from hvdrecover.torch.framework import TorchFramework
from tests.unit.torch.jobs import URL, bits, commit_durably, continues_alike, joined, network, train_one_step

pytestmark = pytest.mark.usefixtures("roots")

Optimizers = torch.optim
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD with momentum": lambda p: Optimizers.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: Optimizers.Adam(p),
    "Adam, fused": lambda p: Optimizers.Adam(p, fused=True, amsgrad=True),
    "AdamW with a tensor as its rate": lambda p: Optimizers.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "Adamax": lambda p: Optimizers.Adamax(p),
    "NAdam": lambda p: Optimizers.NAdam(p),
    "RAdam": lambda p: Optimizers.RAdam(p),
    "Adafactor": lambda p: Optimizers.Adafactor(p, lr=0.1),
    "Adagrad": lambda p: Optimizers.Adagrad(p),
    "Adadelta": lambda p: Optimizers.Adadelta(p),
    "ASGD": lambda p: Optimizers.ASGD(p),
    "RMSprop": lambda p: Optimizers.RMSprop(p, centered=True, momentum=0.5),
    "Rprop": lambda p: Optimizers.Rprop(p),
    "LBFGS": lambda p: Optimizers.LBFGS(p, lr=0.1, max_iter=2, history_size=3),
    "LBFGS with a line search": lambda p: Optimizers.LBFGS(p, line_search_fn="strong_wolfe", max_iter=2),
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_every_optimizer_of_torch_continues_alike(make: Callable[..., Any], steps: int) -> None:
    def model_and_optimizer() -> tuple[Any, ...]:
        model = network()
        return model, make(model.parameters())

    continues_alike(model_and_optimizer, train_one_step, steps)


@pytest.mark.parametrize("make", [Optimizers.SparseAdam, Optimizers.Adagrad])
def test_optimizers_of_sparse_gradients_continue_alike(make: Callable[..., Any]) -> None:
    def model_and_optimizer() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = torch.nn.Embedding(6, 2, sparse=True)
        return model, make(model.parameters())

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.tensor([1, 4, 1])).square().sum().backward()
        optimizer.step()

    continues_alike(model_and_optimizer, step)


class WithWideMoments(torch.optim.Optimizer):
    """Keeps float32 averages of bfloat16 gradients, also in containers, as optimizers from elsewhere do."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    self._step(parameter, group["lr"])

    def _step(self, parameter: torch.Tensor, rate: float) -> None:
        state = self.state[parameter]
        if not state:
            wide = torch.zeros_like(parameter, dtype=torch.float32)
            state.update(
                mean=wide, history=[wide.clone()], more={"master": parameter.float()}, mode="warm-up"
            )
            state["shape"] = tuple(parameter.shape)
        gradient = parameter.grad.float()  # type: ignore[union-attr]
        state["mean"].lerp_(gradient, 0.3)
        state["history"] = [state["mean"].clone(), *state["history"][:2]]
        state["more"]["master"] -= rate * state["mean"]
        parameter.copy_(state["more"]["master"])


def test_state_that_is_wider_than_its_parameter_keeps_its_bits() -> None:
    def model_and_optimizer() -> tuple[Any, ...]:
        model = network(dtype=torch.bfloat16)
        return model, WithWideMoments(model.parameters())

    continues_alike(model_and_optimizer, train_one_step)


def test_an_optimizer_of_another_kind_is_named_and_left_as_it_is() -> None:
    model = network()
    state = joined(model=model, optimizer=Optimizers.SGD(model.parameters(), lr=0.1, momentum=0.9))
    state.optimizer = Optimizers.AdamW(model.parameters())
    with pytest.raises(MismatchError, match=r"momentum.*betas"):
        state.restore()
    assert "betas" in state.optimizer.param_groups[0]


def test_a_commit_from_before_a_scheduler_was_added_keeps_the_schedulers_options() -> None:
    model = network()
    optimizer = Optimizers.SGD(model.parameters(), lr=0.5)
    state = joined(model=model, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    state.restore()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05


class SavesItsOwnWay(WithWideMoments):
    """Has a ``state_dict`` of another form than torch's."""

    def state_dict(self) -> dict[str, Any]:
        return {"means": [self.state[parameter]["mean"] for parameter in self.state]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for parameter, mean in zip(self.state, state_dict["means"], strict=True):
            self.state[parameter]["mean"] = mean


def test_an_optimizer_with_a_state_dict_of_its_own_making() -> None:
    model = network()
    optimizer = SavesItsOwnWay(model.parameters())
    train_one_step(model, optimizer)
    state = joined(model=model, optimizer=optimizer)
    expected = bits(optimizer.state_dict())
    train_one_step(model, optimizer)
    assert bits(optimizer.state_dict()) != expected
    state.restore()
    assert bits(optimizer.state_dict()) == expected


# -- parameters by name ------------------------------------------------------------------------------------


def moments(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Any:
    return {name: bits(optimizer.state[each]["exp_avg"]) for name, each in model.named_parameters()}


@pytest.mark.parametrize("wrap", [lambda model: model, torch.nn.DataParallel], ids=["plain", "wrapped"])
def test_moments_follow_the_names_of_their_parameters(wrap: Callable[..., Any]) -> None:
    model = network()
    optimizer = Optimizers.Adam(
        [{"params": model[2].parameters(), "lr": 0.5}, {"params": model[0].parameters()}]
    )
    train_one_step(model, optimizer)
    commit_durably(joined(URL, model=model, optimizer=optimizer))
    other = network(seed=1)
    turned = [other[0].bias, other[0].weight]
    resumed = Optimizers.Adam([{"params": turned}, {"params": other[2].parameters()}])
    joined(URL, model=wrap(other), optimizer=resumed)
    assert moments(resumed, other) == moments(optimizer, model)
    assert [group["lr"] for group in resumed.param_groups] == [0.5, 0.001]
    assert resumed.param_groups[1]["params"][0] is other[0].weight
    train_one_step(model, optimizer)
    train_one_step(other, resumed)
    assert bits(dict(other.state_dict())) == bits(dict(model.state_dict()))


def test_parameters_that_come_between_commits_have_their_names_in_the_next_one() -> None:
    model, other = network(), network()
    optimizer = Optimizers.Adam(model[2].parameters())
    state = joined(URL, model=model, optimizer=optimizer)
    state.commit()
    model[0] = torch.nn.Linear(3, 4)
    optimizer.add_param_group({"params": model[0].parameters()})
    train_one_step(model, optimizer)
    commit_durably(state)
    resumed = Optimizers.Adam([{"params": each.parameters()} for each in (other[0], other[2])])
    joined(URL, model=other, optimizer=resumed)
    assert moments(resumed, other) == moments(optimizer, model)


def test_a_commit_of_an_earlier_release_goes_by_place() -> None:
    model, other = network(), network()
    optimizer, resumed = Optimizers.Adam(model.parameters()), Optimizers.Adam(other.parameters())
    train_one_step(model, optimizer)
    framework = TorchFramework()
    framework.attributes = {"model": other, "optimizer": resumed}
    fitting, differences = framework.fit("optimizer", resumed, optimizer.state_dict())
    framework.load(resumed, fitting)
    assert (differences, bits(resumed.state_dict())) == ([], bits(optimizer.state_dict()))


def test_another_parameter_in_a_group_is_named() -> None:
    model = network()
    commit_durably(joined(URL, model=model, optimizer=Optimizers.SGD(model.parameters(), lr=0.1)))
    other = network()
    with pytest.raises(MismatchError) as caught:
        joined(URL, model=other, optimizer=Optimizers.SGD(list(other.parameters())[1:], lr=0.1))
    assert any("model.0.bias is in other groups" in line for line in caught.value.differences)


def test_objects_that_others_hold_are_loaded_in_place() -> None:
    model = network()
    plain = Optimizers.AdamW(model.parameters(), lr=torch.tensor(0.5), foreach=False)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)
    state = joined(model=model, optimizer=plain, scheduler=scheduler)
    train_one_step(model, plain)
    state.commit()
    weight = model[0].weight

    def held() -> list[Any]:
        group, entries = plain.param_groups[0], plain.state[weight]
        own = [group, group["params"], group["lr"], entries, entries["exp_avg"], model[0].weight]
        return [plain.param_groups, plain.state, *own]

    before = held()
    train_one_step(model, plain)
    scheduler.step()
    state.restore()
    assert all(one is other for one, other in zip(held(), before, strict=True))
    assert plain.param_groups[0]["lr"].item() == 0.5
