"""The pieces of which the tests of the torch adapter build their jobs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import horovod.torch as hvd
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset

import hvdrecover.torch as recover

URL = "fake://root"
Loading = Literal["plain", "no_batches", "drop_last", "batch_sampler", "workers", "persistent_workers"]


def network(seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    """A small network; equal for equal seeds."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).to(dtype)


def wrapped(
    model: torch.nn.Module,
    kind: Any = torch.optim.SGD,
    *,
    lr: float = 0.1,
    momentum: float = 0.0,
    **options: Any,
) -> Any:
    """An optimizer of a model, in Horovod's wrapper."""
    more = {"momentum": momentum} if momentum else {}
    return hvd.DistributedOptimizer(
        kind(model.parameters(), lr=lr, **more), model.named_parameters(), **options
    )


def train_one_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A step that depends on the model's and the optimizer's state alone."""
    dtype = next(model.parameters()).dtype

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.linspace(-1, 1, 15, dtype=dtype).view(5, 3)).square().sum()
        loss.backward()
        return loss.item()

    optimizer.step(closure)


def joined(checkpoint: recover.Checkpoint | str | None = None, **attributes: Any) -> recover.TorchState:
    """The state of a rank that is alone, after its rendezvous."""
    state = recover.TorchState(checkpoint=checkpoint, **attributes)
    state.sync()
    return state


def commit_durably(state: recover.TorchState) -> None:
    state.commit(durable=True)
    state.flush()


def bits(tree: Any) -> Any:
    """A tree with each tensor as its dtype, shape and bytes."""
    if isinstance(tree, torch.Tensor):
        flat = tree.detach().contiguous().view(-1)
        return (
            str(tree.dtype),
            tuple(tree.shape),
            flat.view(torch.uint8).numpy().tobytes() if len(flat) else b"",
        )
    if isinstance(tree, dict):
        return {key: bits(value) for key, value in tree.items()}
    return [bits(value) for value in tree] if isinstance(tree, list | tuple) else tree


def state_of(*components: Any) -> Any:
    """The bits of all that components hold."""
    return [bits(component.state_dict()) for component in components]


def continues_alike(make: Callable[[], tuple[Any, ...]], step: Callable[..., None], steps: int = 2) -> None:
    """Assert that components continue alike after steps, a commit, and a restore or a durable resume."""

    def name(components: tuple[Any, ...]) -> dict[str, Any]:
        return {f"component_{number}": component for number, component in enumerate(components)}

    components = make()
    state = joined(URL, **name(components))
    for _ in range(steps):
        step(*components)
    commit_durably(state)
    at_commit = state_of(*components)
    step(*components)
    step(*components)
    expected = state_of(*components)
    assert expected != at_commit

    state.restore()
    assert state_of(*components) == at_commit
    step(*components)
    step(*components)
    assert state_of(*components) == expected

    fresh = make()
    joined(URL, **name(fresh))
    assert state_of(*fresh) == at_commit
    step(*fresh)
    step(*fresh)
    assert state_of(*fresh) == expected


class Samples(Dataset[Any]):
    """Features and a label, made from the index, and the index itself; ``augment`` adds noise to features."""

    def __init__(self, length: int, augment: bool = False) -> None:
        self.length = length
        self.augment = augment

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        features = torch.sin(torch.arange(1.0, 5.0) * (index + 1))
        if self.augment:
            features += 0.1 * torch.randn(4)
        return index, features, torch.tensor(index / self.length)


def make_loader(sampler: recover.ElasticSampler, batch_size: int, loading: Loading) -> DataLoader[Any]:
    dataset: Any = sampler.dataset
    workers = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": loading.startswith("persistent")}
    match loading:
        case "no_batches":
            return DataLoader(dataset, batch_size=None, sampler=sampler)
        case "batch_sampler":
            return DataLoader(dataset, batch_sampler=BatchSampler(sampler, batch_size, drop_last=False))
        case "workers" | "persistent_workers":
            return DataLoader(dataset, batch_size, sampler=sampler, **workers)
    return DataLoader(dataset, batch_size, sampler=sampler, drop_last=loading == "drop_last")
