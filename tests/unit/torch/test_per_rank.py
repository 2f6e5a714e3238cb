"""A data loader that knows its place, as each rank's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import hvdrecover.torch as recover
from hvdrecover.state.random import Randomness
from tests.unit.torch.jobs import URL, bits, commit_durably

pytestmark = [
    pytest.mark.usefixtures("roots"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


class Letters(torch.utils.data.IterableDataset[int]):
    """An iterable data set without a state of its own: a loader goes through it again up to its place."""

    def __iter__(self) -> Any:
        return iter(range(12))


def make(workers: int, kind: str, rng: Randomness) -> recover.TorchState:
    data: Any = Letters() if kind == "iterable" else list(range(12))
    loader = StatefulDataLoader(data, batch_size=2, shuffle=kind == "shuffled", num_workers=workers)
    return having(loader, rng)


def having(loader: Any, rng: Randomness) -> recover.TorchState:
    model = torch.nn.Linear(1, 1)
    state = recover.TorchState(
        model, None, rng=rng, checkpoint=URL, loader=recover.PerRank(loader), seen=recover.PerRank([]), step=0
    )
    state.sync()
    return state


def train(state: recover.TorchState, commit_at: int | None = None) -> Any:
    """Train for two epochs; return all that must be equal."""
    while state.step < 12:
        for batch in state.loader:
            state.seen.value.append(batch.tolist())
            with torch.no_grad():
                state.model.weight += torch.rand(()) * batch.sum()
            state.step += 1
            if state.step == commit_at:
                commit_durably(state)
    return bits(state.model.state_dict()), state.seen.value


@pytest.mark.parametrize(
    ("before", "workers", "kind", "rng"),  # commit 3 is in mid-epoch, commit 6 at the last batch of one
    [
        (3, 0, "shuffled", "reseed"),
        (6, 0, "iterable", "store"),
        (3, 1, "iterable", "reseed"),
        (6, 1, "shuffled", "store"),
    ],
)
def test_a_stateful_loader_resumes_to_the_last_bit(
    before: int, workers: int, kind: str, rng: Randomness
) -> None:
    torch.manual_seed(3)
    state = make(workers, kind, rng)
    expected = train(state, before)
    for epoch in range(2):
        seen = sorted(sample for batch in expected[1][6 * epoch : 6 * epoch + 6] for sample in batch)
        assert seen == list(range(12))
    state.restore()
    assert train(state) == expected

    torch.manual_seed(99)
    assert train(make(workers, kind, rng)) == expected
