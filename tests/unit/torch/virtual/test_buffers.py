"""Buffers of modules, one set for each virtual rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hvdrecover.errors import StepError
from hvdrecover.state.rank_local import Carried
from hvdrecover.torch.virtual import Buffers

ALL = Carried((0, 1), 2)


class Masked(torch.nn.Module):
    """Batch norm and a table that no step writes to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)
        self.register_buffer("table", torch.arange(12.0).view(4, 3))
        self.register_buffer("nothing", None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = self.norm(inputs + self.table)
        return normed


def part(buffers: Buffers, module: Masked, rank: int, value: float) -> None:
    """One virtual rank's forward pass."""
    buffers.swap_in(rank)
    module(value * torch.arange(12.0).view(4, 3))
    buffers.swap_out(rank)


def alone(values: list[float]) -> dict[str, torch.Tensor]:
    """The buffers of a module that has only had these passes."""
    module = Masked()
    for value in values:
        module(value * torch.arange(12.0).view(4, 3))
    return {name: each.clone() for name, each in module.named_buffers()}


def assert_equal(module: Masked, expected: dict[str, torch.Tensor]) -> None:
    for name, each in module.named_buffers():
        assert torch.equal(each, expected[name]), name


def test_a_commit_has_what_changes_and_its_model_virtual_rank_0s() -> None:
    module = Masked()
    buffers = Buffers({"model": module})
    part(buffers, module, 0, 1.0)
    part(buffers, module, 1, 5.0)
    states = buffers.states(ALL)
    names = {f"model.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert {rank: set(own) for rank, own in states.items()} == {0: names, 1: names}
    buffers.gathered(states)
    assert_equal(module, alone([1.0]))


def averages(ranks: int) -> torch.Tensor:
    """The average of 1, 2, 3 over the steps of a process with so many virtual ranks."""
    model, carried = Masked(), Carried(tuple(range(ranks)), ranks)
    model.register_parameter("weight", torch.nn.Parameter(torch.zeros(1)))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    buffers = Buffers({"model": model, "averaged": averaged})
    for value in (1.0, 2.0, 3.0):
        buffers.absorb()
        for rank in range(ranks):
            part(buffers, model, rank, value)
        model.weight.data.fill_(value)
        averaged.update_parameters(model)
        buffers.gathered(buffers.states(carried))
        assert averaged.n_averaged == value
    assert "averaged.n_averaged" not in buffers.states(carried)[0]
    average: torch.Tensor = averaged.module.weight
    return average


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_the_script_changes_outside_of_parts_stays(ranks: int) -> None:
    assert averages(ranks).item() == pytest.approx(2.0)


@pytest.mark.parametrize("value", [7.0, float("nan")])
def test_batch_norm_outside_of_parts_changes_it_for_all_virtual_ranks(value: float) -> None:
    module = Masked()
    buffers = Buffers({"model": module})
    for rank, own in enumerate([1.0, 5.0]):
        part(buffers, module, rank, own)
    buffers.gathered(buffers.states(ALL))
    module(value * torch.arange(12.0).view(4, 3))
    expected = alone([1.0, value])
    buffers.absorb()
    for rank in (1, 0):
        buffers.swap_in(rank)
        assert all(
            torch.equal(each.nan_to_num(), expected[name].nan_to_num())
            for name, each in module.named_buffers()
        )


@pytest.mark.parametrize("moment", [Buffers.absorb, lambda buffers: buffers.states(ALL)])
def test_batch_norm_after_the_parts_and_before_the_commit_is_refused(
    moment: Callable[[Buffers], object],
) -> None:
    module = Masked()
    buffers = Buffers({"model": module})
    part(buffers, module, 0, 1.0)
    module(torch.ones(4, 3))
    with pytest.raises(StepError, match=r"^model\.norm\.running_mean: .*state\.commit\(\)"):
        moment(buffers)
