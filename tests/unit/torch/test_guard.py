"""The guard in torch: gradients that are not finite, or missing; the checks of numbers."""

from __future__ import annotations

import importlib.util
import math
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import horovod.torch as hvd
import pytest
import torch

import hvdrecover.torch as recover
from hvdrecover.errors import ConfigError, NumericsError
from hvdrecover.guard.numbers import Missing
from hvdrecover.torch import guard
from tests.unit.torch.jobs import wrapped

WIDTH = 150  # a layer's weight is large, its bias is small


@pytest.fixture(params=["", "1"], ids=["alone", "sending"])
def _elastic(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Horovod's optimizers send gradients, also in a job of one; or they do not."""
    monkeypatch.setenv("HOROVOD_ELASTIC", request.param)


def network(layers: int = 2) -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def guarded(model: torch.nn.Module, optimizer: Any, **settings: Any) -> None:
    recover.TorchState(model, optimizer, guard=recover.Guard(**settings)).sync()


def backward(model: torch.nn.Module, factor: float = 1e-3) -> None:
    (factor * model(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH))).sum().backward()


def a_step(model: torch.nn.Module, optimizer: Any, factor: float = 1e-3, *, by_hand: bool = False) -> None:
    optimizer.zero_grad()
    backward(model, factor)
    if by_hand:
        optimizer.synchronize()
    with optimizer.skip_synchronize() if by_hand else nullcontext():
        optimizer.step()


def values(model: torch.nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


# -- gradients that are not finite -------------------------------------------------------------------


@pytest.mark.usefixtures("_elastic")
@pytest.mark.parametrize(
    "options", [{}, {"groups": 2}, {"backward_passes_per_step": 2}, {"compression": hvd.Compression.fp16}]
)
@pytest.mark.parametrize("where", ["0.weight", "0.bias", "1.weight", "1.bias"])
def test_the_parameter_with_a_bad_gradient_is_named(options: dict[str, Any], where: str) -> None:
    model = network()
    optimizer = wrapped(model, **options)
    guarded(model, optimizer)

    def spoil(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.view(-1)[-1] = math.nan

    parameter = dict(model.named_parameters())[where]
    parameter.register_post_accumulate_grad_hook(spoil)  # type: ignore[no-untyped-call]
    for _ in range(options.get("backward_passes_per_step", 1)):
        backward(model)
    with pytest.raises(NumericsError, match=rf"gradient of model\.{where}\n") as caught:
        optimizer.step()
    assert str(caught.value).count("gradient of") == 1


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
    model = network()
    optimizer = wrapped(model, **options)
    components = {"model": model, "optimizer": optimizer}
    framework = SimpleNamespace(report=lambda what, hook: guard.report_missing(components, hook))
    missing = Missing(cast(Any, SimpleNamespace(world=None, framework=framework)))
    for _ in range(3):
        model[0](torch.ones(1, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert missing.steps == {"model.1.bias": 3, "model.1.weight": 3}


@pytest.mark.usefixtures("elastic")
def test_a_layer_that_is_frozen_after_training_keeps_its_weights() -> None:
    model = network()
    optimizer = wrapped(model, momentum=0.9, groups=2)
    guarded(model, optimizer)
    a_step(model, optimizer)
    before = values(model[0].requires_grad_(False))
    a_step(model, optimizer)
    assert all(map(torch.equal, before, values(model[0])))


# -- numbers that are finite, compiled and by torch ----------------------------------------------------------


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BAD = [math.nan, math.inf, -math.inf]
SIZES = [1, 3, 64, 1000, 1 << 17]


def edges(dtype: torch.dtype, size: int) -> torch.Tensor:
    """The largest and smallest finite numbers, over and over."""
    limits = torch.finfo(dtype)
    some = [limits.max, limits.min, limits.tiny, -limits.smallest_normal, 0.0, -0.0, 1.0]
    return torch.tensor(some * (size // len(some) + 1), dtype=dtype)[:size]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_one_bad_number_is_found_wherever_it_is(dtype: torch.dtype, size: int) -> None:
    tensor = edges(dtype, size)
    assert guard.look(tensor, torch.empty(0, 3), None) is guard.look() is True
    for place in {0, size // 2, size - 1}:
        for value in BAD:
            bad = tensor.clone()
            bad[place] = value
            assert guard.look(bad) is False
            assert guard.look(tensor, bad, tensor) is False


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(
    "form",
    [
        lambda dense: dense.t(),
        lambda dense: dense[:, 1:3],
        lambda dense: dense[1:2].expand(2, 4),
        lambda dense: dense.to_sparse(),
        lambda dense: torch.complex(dense, dense),
    ],
    ids=["transposed", "part", "expanded", "sparse", "complex"],
)
def test_torch_looks_where_the_compiled_look_can_not(form: Any, bad: float) -> None:
    fine = torch.ones(3, 4)
    spoilt = fine.clone()
    spoilt[1, 2] = bad
    assert guard.look(form(fine)) is None
    assert guard.look(torch.ones(2), form(fine)) is None
    assert guard.are_finite([torch.ones(2), form(fine)])
    assert not guard.are_finite([torch.ones(2), form(spoilt)])


def test_without_the_compiled_part_torch_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hvdrecover.torch._finite", None)  # an ImportError
    spec = importlib.util.find_spec("hvdrecover.torch.guard")
    assert spec is not None and spec.loader is not None
    alone = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(alone)
    assert alone.look(torch.ones(3)) is None
    assert alone.are_finite([torch.ones(3), torch.ones(2, dtype=torch.float16)])
    assert not alone.are_finite([torch.ones(3), torch.tensor([1, math.inf])])
