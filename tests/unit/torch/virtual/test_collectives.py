"""Collectives in the part of a virtual rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import horovod.torch as horovods
import pytest
import torch
from torch.utils.data import DataLoader

import hvdrecover.torch as hvd
from hvdrecover.errors import StepError
from hvdrecover.virtual.steps import Step
from tests.unit.torch.jobs import joined, network, wrapped

DATA = torch.arange(12.0).view(4, 3)
ONE = torch.ones(1)


@pytest.fixture
def steps() -> Iterator[Step]:
    """The steps of two virtual ranks."""
    model, sampler = network(), hvd.ElasticSampler(DATA)
    state = joined(model=model, optimizer=wrapped(model), sampler=sampler, virtual_ranks=2)
    loader = DataLoader(DATA, batch_size=1, sampler=sampler)  # type: ignore[arg-type]
    found: Iterator[Step] = state.steps(loader)
    return found


class Averaging(torch.autograd.Function):
    """Sums its gradient up over processes."""

    @staticmethod
    def forward(context: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return hvd.allreduce(gradient, op=hvd.Sum, name="mine")


@pytest.mark.parametrize(
    ("use", "call"),
    [
        (lambda: hvd.allreduce(ONE), "allreduce"),
        (lambda: hvd.synchronize(hvd.allreduce_async_(ONE, name="mine")), "allreduce"),
        (lambda: hvd.grouped_allreduce([ONE, ONE], name="mine"), "grouped_allreduce"),
        (lambda: horovods.allgather(ONE, name="mine"), "allgather"),
        (lambda: hvd.broadcast_object(1, name="mine"), "broadcast"),
        (lambda: hvd.broadcast_parameters({"one": ONE}, 0), "broadcast"),
        (lambda: hvd.alltoall(ONE), "alltoall"),
        (lambda: hvd.reducescatter(ONE), "reducescatter"),
        (hvd.join, "join"),
        (hvd.barrier, "barrier"),
        (lambda: Averaging.apply(ONE.clone().requires_grad_()).sum().backward(), "allreduce"),
    ],
)
def test_every_collective_is_refused_there_and_there_only(
    steps: Iterator[Step], use: Callable[[], Any], call: str
) -> None:
    use()
    parts = iter(next(steps))
    next(parts)
    with pytest.raises(StepError, match=rf"^hvd\.{call}\(\): .* after "):
        use()
    parts.close()  # type: ignore[attr-defined]
    use()
