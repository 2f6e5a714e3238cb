"""One process that has all virtual ranks; what several do together is in tests/integration."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import horovod.torch as hvd
import pytest
import torch

from hvdrecover.errors import ConfigError
from hvdrecover.torch.virtual import Gradients
from tests.unit.torch.jobs import network, wrapped


@pytest.fixture
def elastic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's optimizer has its hooks, as with several processes."""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")


class Own(hvd.Compression.none):  # type: ignore[misc]
    """A way to compress of a user's."""


def loss(model: torch.nn.Module, virtual_rank: int) -> torch.Tensor:
    return model(torch.linspace(-1, 1, 15).view(5, 3) * (virtual_rank + 1)).square().sum()


def step(gradients: Gradients, model: torch.nn.Module, size: int) -> None:
    gradients.begin()
    for virtual_rank in range(size):
        loss(model, virtual_rank).backward()  # type: ignore[no-untyped-call]
        gradients.part_ends(virtual_rank)
    gradients.finish([1], 0)


def leaves(model: torch.nn.Module, size: int) -> list[list[torch.Tensor]]:
    """The gradients of each virtual rank."""
    return [list(torch.autograd.grad(loss(model, each), list(model.parameters()))) for each in range(size)]


def bracketed(values: list[torch.Tensor]) -> torch.Tensor:
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    return bracketed(values[:half]) + bracketed(values[half:])


@pytest.mark.usefixtures("elastic")
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Sum])
def test_gradients_are_those_of_the_tree(size: int, op: Any) -> None:
    model = network()
    gradients = Gradients("optimizer", wrapped(model, op=op), size)
    expected = map(bracketed, map(list, zip(*leaves(model, size), strict=True)))
    step(gradients, model, size)
    for each, total in zip(model.parameters(), expected, strict=True):
        assert each.grad is not None
        assert torch.equal(each.grad, total / size if op == hvd.Average else total)


def test_a_gradient_that_some_virtual_ranks_lack() -> None:
    model = network()
    other = torch.nn.Parameter(torch.ones(3))
    nowhere = torch.nn.Parameter(torch.ones(2))
    bare = torch.optim.SGD([*model.parameters(), other, nowhere], lr=0.1)
    gradients = Gradients("optimizer", hvd.DistributedOptimizer(bare), 4)
    gradients.begin()
    for virtual_rank in range(4):
        if virtual_rank == 2:
            (other * 6).sum().backward()  # type: ignore[no-untyped-call]
        gradients.part_ends(virtual_rank)
    gradients.finish([1], 0)
    assert other.grad is not None and nowhere.grad is not None
    assert torch.equal(other.grad, torch.full((3,), 1.5))
    assert torch.equal(nowhere.grad, torch.zeros(2))


def test_a_gradient_in_another_layout_gets_that_of_its_parameter() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last))
    gradients = Gradients("optimizer", hvd.DistributedOptimizer(torch.optim.SGD([parameter])), 1)
    gradients.begin()
    values = torch.arange(120.0).view(2, 3, 4, 5)
    parameter.grad = values.clone()
    gradients.part_ends(0)
    gradients.finish([1], 0)
    assert parameter.grad is not None
    assert parameter.grad.stride() == parameter.stride() and torch.equal(parameter.grad, values)


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.SGD(model.parameters()),
        lambda model: wrapped(model, gradient_predivide_factor=2.0),
        lambda model: wrapped(model, op=hvd.Min),
        lambda model: wrapped(model, compression=Own),
    ],
)
def test_what_can_not_be_summed_is_refused(make: Callable[[torch.nn.Module], Any]) -> None:
    with pytest.raises(ConfigError, match=r"^state\.optimizer: .*DistributedOptimizer with op=Average"):
        Gradients("optimizer", make(network()), 2)


@pytest.mark.parametrize("dense", [False, True])
def test_sparse_gradients_are_refused_unless_made_dense(dense: bool) -> None:
    layer = torch.nn.Embedding(4, 2, sparse=True)
    gradients = Gradients("optimizer", wrapped(layer, sparse_as_dense=dense), 1)
    gradients.begin()
    total = layer(torch.tensor([1])).sum()
    total.backward()
    if not dense:
        with pytest.raises(ConfigError, match="sparse_as_dense=True"):
            gradients.part_ends(0)
        return
    gradients.part_ends(0)
    gradients.finish([1], 0)
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.tensor([[0.0, 0], [1, 1], [0, 0], [0, 0]]))


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_no_step_without_gradients_of_a_whole_step(begun: bool, skips: bool) -> None:
    model = network()
    optimizer = wrapped(model)
    gradients = Gradients("optimizer", optimizer, 2)
    before = [each.detach().clone() for each in model.parameters()]
    if begun:
        step(gradients, model, 2)
        gradients.begin()
    with pytest.raises(ConfigError, match=r"^state\.optimizer: .*for part in step"):
        if skips:
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            loss(model, 0).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("change", ["added", "unfrozen"])
def test_parameters_that_come_later_are_refused(change: str) -> None:
    model, later = network(), torch.nn.Parameter(torch.zeros(7), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*model.parameters(), later], lr=0.1))
    gradients = Gradients("optimizer", optimizer, 2)
    step(gradients, model, 2)
    if change == "added":
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(7))]})
    else:
        later.requires_grad_()
    with pytest.raises(ConfigError, match=r"^state\.optimizer: .*\(7,\)"):
        step(gradients, model, 2)
