"""A data loader that knows its place, as each rank's own."""

from __future__ import annotations

import tempfile
from pathlib import Path
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


def examples(shards: list[int]) -> Any:
    for shard in shards:
        for number in range(6):
            yield 6 * shard + number, {"x": 6 * shard + number}


def test_an_iterable_data_set_of_hugging_face_resumes_where_it_was() -> None:
    reason = "datasets brings 300 MB along; install it to run this"
    iterable = pytest.importorskip("datasets.iterable_dataset", reason=reason)

    def make() -> recover.TorchState:
        data = iterable.IterableDataset(iterable.ExamplesIterable(examples, {"shards": [0, 1, 2]}))
        state = recover.TorchState(
            checkpoint=URL, data=recover.PerRank(data), epoch=0, seen=recover.PerRank([])
        )
        state.sync()
        return state

    def train(state: recover.TorchState, commit_at: int = 0) -> Any:
        while state.epoch < 2:
            state.data.value.set_epoch(state.epoch)
            for example in state.data:
                state.seen.value.append(example["x"])
                if len(state.seen.value) == commit_at:
                    commit_durably(state)
            state.epoch += 1
        return state.seen.value

    state = make()
    assert train(state, commit_at=8) == 2 * list(range(18))
    state.restore()
    assert train(state) == 2 * list(range(18))
    assert train(make()) == 2 * list(range(18))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("before", [3, 6, 8])  # in mid-epoch, at the last batch of one, and in the next one
def test_a_streaming_loader_of_mosaicml_resumes_to_the_last_bit(
    before: int, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # its locks stay where they are made
    streaming = pytest.importorskip("streaming", reason="streaming wants older packages; see docs/data.md")

    class Loader(streaming.StreamingDataLoader):  # type: ignore[name-defined,misc]
        """As docs/data.md has it."""

        def load_state_dict(self, obj: dict[str, Any]) -> None:
            self.dataset.next_epoch = self.num_samples_yielded = 0
            super().load_state_dict(obj)

    def make() -> recover.TorchState:
        data = streaming.StreamingDataset(local=str(tmp_path / "data"), batch_size=2, shuffle=True)
        seeds = torch.Generator()  # else it draws from the global one
        loader = Loader(data, 2, num_workers=workers, collate_fn=numbers, generator=seeds)
        return having(loader, "reseed")

    with streaming.MDSWriter(out=str(tmp_path / "data"), columns={"x": "int"}, size_limit=200) as writer:
        for number in range(12):
            writer.write({"x": number})
    torch.manual_seed(3)
    state = make()
    expected = train(state, before)
    for epoch in range(2):
        seen = sorted(sample for batch in expected[1][6 * epoch : 6 * epoch + 6] for sample in batch)
        assert seen == list(range(12))
    for _ in range(2):
        state.restore()
        state.sync()  # asks it for its state before it is iterated over
        assert train(state) == expected

    torch.manual_seed(99)
    assert train(make()) == expected


def numbers(samples: list[dict[str, int]]) -> torch.Tensor:
    return torch.tensor([sample["x"] for sample in samples])
