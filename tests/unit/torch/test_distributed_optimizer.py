"""Horovod's wrapper, whose hooks an elastic job has even when it is one process."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import pytest
import torch

from tests.unit.torch.jobs import end_allreduces, joined, network, state_of, wrapped

pytestmark = pytest.mark.usefixtures("roots")


@pytest.fixture(autouse=True)
def hooks_as_in_an_elastic_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")


@pytest.mark.parametrize("told", [True, False], ids=["named", "unnamed"])
def test_horovod_averages_by_names_that_neither_order_nor_compilation_changes(told: bool) -> None:
    model = network()
    compiled = torch.compile(model, backend="eager")
    inner = torch.optim.SGD(list(model.parameters())[::-1], lr=0.1)
    optimizer: Any = hvd.DistributedOptimizer(inner, compiled.named_parameters() if told else None)
    joined(model=compiled, optimizer=optimizer)
    prefix = "" if told else "model."
    expected = {f"{prefix}{name}": each for name, each in model.named_parameters()}
    found = {name: each for each, name in optimizer._parameter_names.items()}
    assert found.keys() == expected.keys()
    assert all(found[name] is each for name, each in expected.items())


def backward(model: torch.nn.Module) -> None:
    model(torch.linspace(-1, 1, 15).view(5, 3)).square().sum().backward()


def interrupted_backward(model: torch.nn.Module, wrapper: Any, layer: int) -> None:
    """A backward pass that ends in an error when it has come down to a layer."""
    handle = model[layer].register_full_backward_hook(fail)
    with pytest.raises(RuntimeError, match="a rank was lost"):
        model(torch.linspace(-1, 1, 15).view(5, 3).requires_grad_()).square().sum().backward()
    handle.remove()
    end_allreduces(wrapper)


def fail(*_: Any) -> None:
    raise RuntimeError("a rank was lost")


@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"groups": 2}, {"backward_passes_per_step": 2}])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_step_after_an_interrupted_backward_pass_is_that_of_an_undisturbed_run(
    options: dict[str, Any], layer: int
) -> None:
    passes = options.get("backward_passes_per_step", 1)

    def train(model: torch.nn.Module, wrapper: Any) -> None:
        for _ in range(passes):
            backward(model)
        wrapper.step()
        wrapper.zero_grad()  # after the step, so that nothing clears what the interrupted pass has left

    def pair() -> tuple[Any, Any]:
        model = network()
        return model, wrapped(model, momentum=0.9, **options)

    undisturbed = pair()
    for _ in range(3):
        train(*undisturbed)

    model, wrapper = pair()
    state = joined(model=model, optimizer=wrapper)
    train(model, wrapper)
    state.commit()
    interrupted_backward(model, wrapper, layer)
    state.restore()
    for _ in range(2):
        train(model, wrapper)
    assert state_of(model, wrapper) == state_of(*undisturbed)


def test_sparse_gradients_of_a_transposed_parameter_are_averaged() -> None:
    model = torch.nn.Embedding(4, 2, sparse=True)
    model.weight = torch.nn.Parameter(torch.ones(2, 4).t())
    wrapper = wrapped(model, lr=1.0)
    model(torch.tensor([3])).sum().backward()
    wrapper.step()
    assert model.weight.tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]
