"""The guard in torch: gradients that are not finite or missing, rank-local state, shares of the data."""

from __future__ import annotations

import math
from typing import Any, cast

import horovod.torch as hvd
import pytest
import torch

import hvdrecover.torch as recover
from hvdrecover.errors import ConfigError, NumericsError
from hvdrecover.guard.numbers import Missing
from hvdrecover.torch import guard

WIDTH = 150  # a layer's weight is large, its bias is small
OPTIONS: list[dict[str, Any]] = [
    {},
    {"groups": 2},
    {"backward_passes_per_step": 2},
    {"compression": hvd.Compression.fp16},
]


@pytest.fixture(params=["", "1"], ids=["alone", "sending"])
def _elastic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's optimizers send gradients, also in a job of one; or they do not."""
    monkeypatch.setenv("HOROVOD_ELASTIC", request.param)


def network(layers: int = 2) -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def wrapped(model: torch.nn.Module, kind: Any = torch.optim.SGD, **options: Any) -> Any:
    inner = kind(model.parameters(), lr=0.1)
    return hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters(), **options)


def guarded(model: torch.nn.Module, optimizer: Any, **settings: Any) -> None:
    recover.TorchState(model, optimizer, guard=recover.Guard(**settings)).sync()


def backward(model: torch.nn.Module, factor: float = 1e-3) -> None:
    (factor * model(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH))).sum().backward()


def a_step(model: torch.nn.Module, optimizer: Any, factor: float = 1e-3, *, by_hand: bool = False) -> None:
    optimizer.zero_grad()
    backward(model, factor)
    if by_hand:
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    else:
        optimizer.step()


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


# -- gradients that are not finite -------------------------------------------------------------------


class Judge:
    """Takes reports of steps."""

    steps: Any

    def __init__(self) -> None:
        self.bad: list[Any] = []
        self.fine = 0

    def stepped(self) -> None:
        self.fine += 1

    def gradients(self, everywhere: Any, here: Any) -> None:
        self.bad.append(here)


@pytest.mark.usefixtures("_elastic")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("where", ["0.weight", "0.bias", "1.weight", "1.bias"])
def test_the_parameter_with_a_bad_gradient_is_named(options: dict[str, Any], where: str) -> None:
    model, judge = network(), Judge()
    optimizer = wrapped(model, **options)
    guard.report_gradients({"model": model, "optimizer": optimizer}, cast(Any, judge))

    def spoil(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.view(-1)[-1] = math.nan

    parameter = dict(model.named_parameters())[where]
    spoilt = parameter.register_post_accumulate_grad_hook(spoil)  # type: ignore[no-untyped-call]
    for _ in range(2):
        for _ in range(options.get("backward_passes_per_step", 1)):
            backward(model)
        optimizer.step()
        optimizer.zero_grad()
        spoilt.remove()
    assert (judge.bad, judge.fine) == ([[f"model.{where}"]], 1)


@pytest.mark.usefixtures("_elastic")
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_bad_step_is_applied_by_no_optimizer_and_counted_once(kind: Any, by_hand: bool) -> None:
    model = network()
    optimizer = wrapped(model, kind)
    guarded(model, optimizer, numerics="skip", numerics_budget=1)
    a_step(model, optimizer)
    before, slots = values(model), len(optimizer.state)
    a_step(model, optimizer, math.nan, by_hand=by_hand)
    assert all(map(torch.equal, before, values(model)))
    assert len(optimizer.state) == slots
    a_step(model, optimizer)
    assert not all(map(torch.equal, before, values(model)))
    with pytest.raises(NumericsError, match=r"\n1 of .* 1000 "):
        a_step(model, optimizer, math.nan, by_hand=by_hand)


def test_an_overflow_of_loss_scaling_is_no_fault() -> None:
    model = network()
    optimizer = wrapped(model)
    guarded(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (1.0, math.inf, 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(4, WIDTH)).sum() * factor).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 1.0


@pytest.mark.usefixtures("_elastic")
def test_a_sparse_gradient_is_looked_at_beside_others() -> None:
    model = torch.nn.ModuleList([torch.nn.EmbeddingBag(4, 2, sparse=True, mode="sum"), torch.nn.Linear(2, 1)])
    optimizer = wrapped(model)
    guarded(model, optimizer)
    embedded = model[0](torch.tensor([[1, 1]]))
    model[0].weight.register_hook(lambda gradient: gradient * math.inf)
    model[1](embedded).sum().backward()
    with pytest.raises(NumericsError, match=r"gradient of model\.0\.weight"):
        optimizer.step()


def test_adasum_has_no_common_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network()
    optimizer = wrapped(model)
    monkeypatch.setattr(optimizer, "_starting_models", {}, raising=False)
    with pytest.raises(ConfigError, match=r"^state\.optimizer: Adasum .*Guard\(numerics=None\)"):
        recover.TorchState(model, optimizer, guard=recover.Guard())
    recover.TorchState(model, optimizer, guard=recover.Guard(numerics=None))


# -- missing gradients ---------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"groups": 2}])
def test_missing_gradients_are_counted_by_name(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    optimizer = wrapped(layers, **options)
    missing = Missing(cast(Any, None))
    guard.report_missing({"model": layers, "optimizer": optimizer}, missing)
    for _ in range(3):
        layers[0](torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert missing.steps == {"model.1.bias": 3, "model.1.weight": 3}
