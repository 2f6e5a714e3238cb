"""The states of torch's components, resumed or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import hvdrecover.torch as recover
from hvdrecover.errors import UnsupportedTensorError
from tests.unit.torch.jobs import (
    URL,
    commit_durably,
    continues_alike,
    joined,
    network,
    train_one_step,
    wrapped,
)

pytestmark = pytest.mark.usefixtures("roots")

schedulers = torch.optim.lr_scheduler


def pair() -> tuple[Any, Any]:
    model = network()
    return model, torch.optim.AdamW(model.parameters())


def test_all_ranks_count_backward_passes_from_0_after_an_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")  # or Horovod adds up nothing in a job of one
    model = network()
    optimizer = wrapped(model, backward_passes_per_step=2)
    state = joined(model=model, optimizer=optimizer)
    inputs = torch.ones(2, 3)
    model(inputs).sum().backward()
    state.sync()  # as after hosts have come: this rank, whose state all take, must count as they do
    model(inputs).sum().backward()
    model(inputs).sum().backward()
    optimizer.step()


def test_settings_of_the_script_that_a_commit_overrules_are_named(caplog: pytest.LogCaptureFixture) -> None:
    def start(rate: float, decay: float) -> Any:
        model = network()
        optimizer = torch.optim.SGD([{"params": [each]} for each in model.parameters()], lr=rate)
        scheduler = schedulers.ExponentialLR(optimizer, decay)
        state = joined(URL, model=model, optimizer=optimizer, scheduler=scheduler)
        return state, scheduler, [each for each in caplog.messages if "the script sets" in each]

    state, scheduler, lines = start(0.1, 0.5)
    assert lines == []
    scheduler.step()  # a rate that training has changed is no setting of the script's
    commit_durably(state)
    assert start(0.1, 0.5)[2] == []
    state, _, (line,) = start(0.2, 0.25)
    assert "optimizer.lr to 0.2, but the run was started with 0.1" in line
    assert "scheduler.gamma to 0.25, but the run was started with 0.5" in line
    assert state.optimizer.param_groups[0]["lr"] == 0.05
    commit_durably(state)
    assert len(start(0.2, 0.5)[2]) == 2  # the first start's still count


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3]),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 1.0, total_steps=9),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 0.9**step),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, total_iters=2), schedulers.ExponentialLR(o, 0.5)], [3]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, total_iters=3), schedulers.ExponentialLR(o, 0.5)]
    ),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS.keys())
@pytest.mark.parametrize("rate", [0.1, "tensor"])
def test_schedulers_continue_alike(make: Callable[[Any], Any], rate: Any) -> None:
    def components() -> tuple[Any, ...]:
        model = network()
        lr = torch.tensor(0.1) if rate == "tensor" else rate
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, foreach=False)
        return model, optimizer, make(optimizer)

    def step(model: Any, optimizer: Any, scheduler: Any) -> None:
        train_one_step(model, optimizer)
        scheduler.step()

    continues_alike(components, step)


def test_a_gradient_scaler_continues_alike() -> None:
    def components() -> tuple[Any, ...]:
        return (*pair(), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3))

    def step(model: Any, optimizer: Any, scaler: Any) -> None:
        optimizer.zero_grad()
        scaler.scale(model(torch.linspace(-1, 1, 15).view(5, 3)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    continues_alike(components, step)


def test_a_gradient_scaler_unscales_a_step_that_is_repeated_after_a_fault() -> None:
    model, optimizer = pair()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    state = recover.TorchState(model, optimizer, scaler=scaler)
    state.sync()
    for fault in (True, False):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).sum()).backward()
        scaler.unscale_(optimizer)  # before the ranks exchange gradients, and one of them is lost
        if fault:
            state.restore()
    expected = torch.autograd.grad(model(torch.ones(2, 3)).sum(), list(model.parameters()))
    assert all(map(torch.equal, (each.grad for each in model.parameters()), expected))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(2).to_sparse_csr(),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        lambda: TwoTensor(torch.ones(2), torch.ones(2)),
    ],
    ids=["compressed", "jagged", "quantized", "made of two"],
)
def test_a_tensor_that_can_not_be_kept_is_refused_when_the_state_is_made(make: Any) -> None:
    """The tests of all adapters have more kinds."""
    with pytest.raises(UnsupportedTensorError, match=r"weight: .*\(.*Tensor.*\).* dense "):
        joined(box={"weight": make()})


def test_a_tensor_that_is_sharded_over_ranks_is_refused_in_words() -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        sharded = distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0]), [Shard(0)])
        with pytest.raises(UnsupportedTensorError, match=r"weight: replicated state only, .*DTensor"):
            joined(box={"weight": sharded})
    finally:
        torch.distributed.destroy_process_group()


class OfVersionThree(torch.nn.Module):
    """Converts what it takes for the state of an old release, as some of torch's layers do."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get("version", 1) < 3:
            state_dict[f"{prefix}scale"] = 1 / state_dict[f"{prefix}scale"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)


def test_layers_are_told_that_the_state_is_of_their_version() -> None:
    model = torch.nn.Sequential(OfVersionThree())
    model[0].scale.fill_(4.0)
    state = joined(model=model)
    model[0].scale.fill_(5.0)
    state.restore()
    assert model[0].scale.tolist() == [4.0]
