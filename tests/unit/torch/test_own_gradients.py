"""Gradients on their way to the other ranks; an elastic job sends them even when it is one process."""

from __future__ import annotations

import math
from typing import Any, cast

import horovod.torch as hvd
import pytest
import torch

import hvdrecover.torch as recover
from hvdrecover.errors import NumericsError
from hvdrecover.torch.guard import report_gradients


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


WIDTH = 150  # a layer's weight is large, its bias is small
GROUPED = {"groups": 2}
TWICE = {"backward_passes_per_step": 2}
COMPRESSED = {"compression": hvd.Compression.fp16}


@pytest.fixture(autouse=True)
def _elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")


def network(layers: int = 2) -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def wrapped(model: torch.nn.Module, **options: Any) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(inner, named_parameters=model.named_parameters(), **options)


def backward(model: torch.nn.Module) -> None:
    (1e-3 * model(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH))).sum().backward()


@pytest.mark.parametrize("options", [{}, GROUPED, TWICE, COMPRESSED])
def test_training_is_the_same_to_the_bit(options: dict[str, Any]) -> None:
    def trained(*, watched: bool) -> dict[str, torch.Tensor]:
        model = network()
        optimizer = wrapped(model, **options)
        if watched:
            report_gradients({"optimizer": optimizer}, cast(Any, Judge()))
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(options.get("backward_passes_per_step", 1)):
                backward(model)
            optimizer.step()
        return model.state_dict()

    watched, alone = trained(watched=True), trained(watched=False)
    assert all(torch.equal(watched[name], alone[name]) for name in alone)


@pytest.mark.parametrize("options", [{}, GROUPED, TWICE, COMPRESSED])
@pytest.mark.parametrize("where", ["0.weight", "0.bias", "1.weight", "1.bias"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_was_bad_is_known_after_it_was_sent(options: dict[str, Any], where: str, value: float) -> None:
    model = network()
    optimizer = wrapped(model, **options)
    judge = Judge()
    report_gradients({"model": model, "optimizer": optimizer}, cast(Any, judge))
    parameters = dict(model.named_parameters())

    def spoil(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.view(-1)[-1] = value

    spoilt = parameters[where].register_post_accumulate_grad_hook(spoil)  # type: ignore[no-untyped-call]
    for _ in range(2):
        for _ in range(options.get("backward_passes_per_step", 1)):
            backward(model)
        optimizer.step()
        optimizer.zero_grad()
        spoilt.remove()
    assert (judge.bad, judge.fine) == ([[f"model.{where}"]], 1)


def test_too_many_backward_passes_are_horovods_error() -> None:
    model = network()
    optimizer = wrapped(model)
    report_gradients({"optimizer": optimizer}, cast(Any, Judge()))
    backward(model)
    with pytest.raises(AssertionError, match="more than backward_passes_per_step times"):
        backward(model)
    optimizer.synchronize()


def test_a_step_that_was_broken_off_leaves_nothing() -> None:
    model = network()
    optimizer = wrapped(model)
    state = recover.TorchState(model, optimizer, guard=recover.Guard(numerics="skip"))
    state.sync()
    backward(model)
    for handle, _ in optimizer._handles.values():  # what Horovod has begun it gives up when ranks are lost
        hvd.synchronize(handle)
    state.restore()
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    assert all(bool(torch.isfinite(each).all()) for each in model.parameters())


def test_a_parameter_without_a_gradient_is_sent_as_zeros() -> None:
    model = network(3)
    optimizer = wrapped(model)
    recover.TorchState(model, optimizer, guard=recover.Guard()).sync()
    backward(model[:2])
    optimizer.step()
    assert torch.count_nonzero(model[2].bias.grad) == 0


def test_a_step_is_counted_once_whoever_has_gradients_averaged() -> None:
    model = network()
    optimizer = wrapped(model)
    guard = recover.Guard(numerics="skip", numerics_budget=1)
    recover.TorchState(model, optimizer, guard=guard).sync()

    def bad_step() -> None:
        optimizer.zero_grad()
        (model(torch.ones(1, WIDTH)).sum() * math.nan).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()

    bad_step()
    with pytest.raises(NumericsError, match=r"\n1 of .* 1000 "):
        bad_step()


def test_sparse_gradients_are_looked_at() -> None:
    model = torch.nn.EmbeddingBag(4, 2, sparse=True, mode="sum")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    recover.TorchState(model, optimizer, guard=recover.Guard()).sync()
    (model(torch.tensor([[1, 1]])).sum() * math.inf).backward()
    with pytest.raises(NumericsError, match=r"gradient of model\.weight"):
        optimizer.step()


def test_a_sparse_gradient_is_looked_at_beside_others() -> None:
    model = torch.nn.ModuleList([torch.nn.EmbeddingBag(4, 2, sparse=True, mode="sum"), torch.nn.Linear(2, 1)])
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
    )
    recover.TorchState(model, optimizer, guard=recover.Guard()).sync()
    embedded = model[0](torch.tensor([[1, 1]]))
    model[0].weight.register_hook(lambda gradient: gradient * math.inf)
    model[1](embedded).sum().backward()
    with pytest.raises(NumericsError, match=r"gradient of model\.0\.weight"):
        optimizer.step()
