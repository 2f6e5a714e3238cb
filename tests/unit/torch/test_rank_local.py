"""A guard names batch norm's statistics, and tensors that each rank adds up for itself."""

from __future__ import annotations

import pytest
import torch

import hvdrecover.torch as recover
from hvdrecover.torch.framework import TorchFramework
from tests.unit.state.jobs import Process, on_ranks


def test_batch_norm_and_plain_tensors_are_named_and_trained_ones_are_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def body(process: Process) -> None:
        process.framework = TorchFramework()  # type: ignore[assignment]
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
        guard = recover.Guard(parameters_every_commits=1)
        state = process.state(guard=guard, model=model, noise=torch.zeros(2), step=0)
        state.sync()
        model(torch.arange(8.0).view(4, 2) * (1 + process.world.rank()))
        state.noise += process.world.rank()
        state.step += 1
        state.commit()

    on_ranks(2, body)
    (line,) = [each.getMessage() for each in caplog.records if "after a recovery" in each.getMessage()]
    assert line.startswith("state.noise differs between the ranks; running statistics are each rank's own")
    assert "(model.1.running_mean, model.1.running_var)" in line
