"""Steps of optimizers in a job of one: their reports, Horovod's wrapper, and the scalars made of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import pytest
import torch

import hvdrecover.torch as recover
from hvdrecover.errors import ConfigError
from hvdrecover.scalars import as_numbers
from hvdrecover.torch.framework import TorchFramework
from hvdrecover.torch.stepping import steps_of
from hvdrecover.torch.virtual import Gradients
from tests.integration.scalars import read
from tests.unit.torch.jobs import joined, network, state_of, wrapped

KINDS = ["plain", "wrapped", "wrapped, without hooks"]
INSIDE = ["averaging", "averaged"]
INPUTS = torch.linspace(-1, 1, 15).view(5, 3)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[torch.nn.Module, Any]]:
    """Makes models and their optimizers; Horovod's send gradients off as in an elastic job, or do not."""

    def make(kind: str) -> tuple[torch.nn.Module, Any]:
        model = network()
        with monkeypatch.context() as elastic:
            elastic.setenv("HOROVOD_ELASTIC", "1" if kind == "wrapped" else "")
            return model, torch.optim.SGD(model.parameters(), lr=0.1) if kind == "plain" else wrapped(model)

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


def end_allreduces(optimizer: Any) -> None:
    """No allreduce is in flight any more, as after Horovod was shut down; the optimizer does not know."""
    for handle, _ in getattr(optimizer, "_handles", {}).values():
        if handle is not None:
            hvd.synchronize(handle)


def fail(*_: Any) -> None:
    raise RuntimeError("a rank was lost")


@pytest.mark.parametrize(
    ("kind", "where"),
    [*itertools.product(KINDS, ["begins", "applying"]), *itertools.product(KINDS[1:], INSIDE)],
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


@pytest.mark.usefixtures("elastic")
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


@pytest.mark.usefixtures("elastic", "roots")
@pytest.mark.parametrize("options", [{}, {"groups": 1}, {"groups": 2}, {"backward_passes_per_step": 2}])
@pytest.mark.parametrize("layer", [0, 2])
def test_a_step_after_an_interrupted_backward_pass_is_that_of_an_undisturbed_run(
    options: dict[str, Any], layer: int
) -> None:
    passes = options.get("backward_passes_per_step", 1)

    def train(model: torch.nn.Module, wrapper: Any) -> None:
        for _ in range(passes):
            model(INPUTS).square().sum().backward()
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
    handle = model[layer].register_full_backward_hook(fail)
    with pytest.raises(RuntimeError, match="a rank was lost"):
        model(INPUTS.clone().requires_grad_()).square().sum().backward()
    handle.remove()
    end_allreduces(wrapper)
    state.restore()
    for _ in range(2):
        train(model, wrapper)
    assert state_of(model, wrapper) == state_of(*undisturbed)


@pytest.mark.usefixtures("elastic")
def test_sparse_gradients_of_a_transposed_parameter_are_averaged() -> None:
    model = torch.nn.Embedding(4, 2, sparse=True)
    model.weight = torch.nn.Parameter(torch.ones(2, 4).t())
    wrapper = wrapped(model, lr=1.0)
    model(torch.tensor([3])).sum().backward()
    wrapper.step()
    assert model.weight.tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]


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


def test_complex_gradients_have_a_norm(tmp_path: Path) -> None:
    model = torch.nn.ParameterList([torch.ones(1, dtype=torch.complex64)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = joined(model=model, optimizer=optimizer, tensorboard=str(tmp_path))
    (model[0] * (3 + 4j)).real.sum().backward()
    optimizer.step()
    state.finish()
    assert read(tmp_path / "rank-0").scalars["norm/averaged_gradient"] == {1: 5.0}


def test_the_loss_keeps_no_graph_and_is_not_changed_later() -> None:
    loss = torch.ones((), requires_grad=True) * 2
    kept = as_numbers(TorchFramework(), {"loss": loss})["loss"]
    loss.detach().fill_(7.0)
    assert (float(kept), kept.requires_grad) == (2.0, False)
