"""Virtual ranks in torch: their buffers, their gradients and their batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import horovod.torch as hvd
import torch
from torch.utils.data import BatchSampler, DataLoader

from hvdrecover.data.order import SampleOrder, is_sampler
from hvdrecover.errors import ConfigError
from hvdrecover.state.adapter import Framework
from hvdrecover.state.rank_local import PerRank
from hvdrecover.torch.copying import all_equal
from hvdrecover.torch.optimizers import parameters_of
from hvdrecover.torch.virtual_gradients import Gradients
from hvdrecover.virtual import buffers, ranks
from hvdrecover.virtual.ranks import VirtualRanks
from hvdrecover.virtual.shares import Policy
from hvdrecover.virtual.steps import Batches, Feed, Part, aside, deal, streams


def virtual_ranks(components: Mapping[str, Any], size: int, policy: Policy | None) -> VirtualRanks:
    modules = {name: each for name, each in components.items() if isinstance(each, torch.nn.Module)}
    ranks.watch(hvd.mpi_ops, "mpi_lib", _look)
    optimizers = {name: each for name, each in components.items() if isinstance(each, torch.optim.Optimizer)}
    parameters = [parameter for each in optimizers.values() for parameter in parameters_of(each)]
    if len(set(parameters)) < len(parameters):
        raise ConfigError(
            "virtual_ranks",
            "two optimizers have the same parameter, and virtual ranks give a gradient to one optimizer; "
            "leave the parameter to one of them",
        )
    gradients = [Gradients(name, each, size) for name, each in optimizers.items()]
    return VirtualRanks(size, policy, Buffers(modules), gradients)


def _look(call: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective of Horovod's library that is refused in a part, unless it is ours."""
    ours = ranks.OURS.encode()

    def begin(*arguments: Any) -> Any:
        if not any(isinstance(each, bytes) and each.startswith(ours) for each in arguments):
            ranks.refuse(call)
        return function(*arguments)

    return begin


# -- buffers -------------------------------------------------------------------------------------------------


class Buffers(buffers.Buffers):
    """See `hvdrecover.virtual.buffers.Buffers`."""

    def __init__(self, modules: Mapping[str, torch.nn.Module]) -> None:
        self._slots = {
            ".".join(filter(None, (attribute, prefix, key))): (each._buffers, key)
            for attribute, module in modules.items()
            for prefix, each in module.named_modules()
            for key in each._buffers
        }
        super().__init__()

    def names(self) -> Iterator[str]:
        return (name for name, (buffers, key) in self._slots.items() if buffers[key] is not None)

    def read(self, name: str) -> torch.Tensor:
        return self._tensor(name).clone()

    def write(self, name: str, tensor: torch.Tensor) -> None:
        self._tensor(name).copy_(tensor)

    def same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        return (one.dtype, one.shape) == (other.dtype, other.shape) and all_equal([(one, other)])

    def _tensor(self, name: str) -> torch.Tensor:
        module, key = self._slots[name]
        tensor: torch.Tensor = module[key]
        return tensor.detach()


# -- batches -------------------------------------------------------------------------------------------------


def feed(loader: Any, tracked: Mapping[str, Any], framework: Framework) -> Feed:
    """Return the source of a loop's batches: a data loader with a tracked sampler, or a tracked `PerRank`."""
    if isinstance(loader, PerRank) and any(loader is each for each in tracked.values()):
        return lambda ranks: streams(loader, ranks, framework)
    sampler = getattr(loader, "sampler", None)
    if not any(sampler is each for each in tracked.values()) or not is_sampler(sampler):
        raise ConfigError(
            "state.steps()",
            f"a {type(loader).__name__} can't be dealt out to virtual ranks; pass a DataLoader whose "
            "sampler, an ElasticSampler, is in the state, or a PerRank of the state",
        )
    if not isinstance(loader, DataLoader) or type(loader.batch_sampler) is not BatchSampler:
        raise ConfigError(
            "state.steps()", "make the DataLoader with batch_size=, and without a batch_sampler"
        )
    return lambda ranks: _dealt(loader, ranks, framework)


def _dealt(loader: DataLoader[Any], ranks: VirtualRanks, framework: Framework) -> Iterator[Batches]:
    """Deal the batches of a data loader out, one sample to each virtual rank in turn.

    Samples are fetched, and augmented, under random streams of the virtual rank, whichever of the loader's
    processes does it.
    """
    order: SampleOrder = loader.sampler.order  # type: ignore[attr-defined]
    size: int = loader.batch_size  # type: ignore[assignment]

    def read(parts: Iterable[Part]) -> Iterator[Any]:
        seeded = (_Seeds(each.tolist(), ranks.sample_seeds(step, rank)) for step, rank, each in parts)
        # A copy, as the constructor of the script's own class may take other arguments.
        reading = copy.copy(loader)
        dataset = _Seeded(loader.dataset, framework)
        vars(reading).update(batch_sampler=seeded, dataset=dataset, _iterator=None)
        with aside(framework):  # a loader draws, too
            return iter(reading)

    return deal(order, size, ranks, read, drop_last=loader.drop_last)


class _Seeds(list[int]):
    """The samples of one virtual rank in one step, and the seeds of the generators while they are fetched."""

    def __init__(self, samples: list[int], seeds: Callable[[str], int]) -> None:
        super().__init__(samples)
        self.seeds = seeds


class _Seeded:
    """A data set whose samples are fetched part by part, each under its own seeds."""

    def __init__(self, dataset: Any, framework: Framework) -> None:
        self._framework = framework
        self._dataset = dataset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # A worker_init_fn may open a file, and leave it here.
        setattr(self._dataset, name, value) if "_dataset" in vars(self) else super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        return _Seeded, (self._dataset, self._framework)  # workers may be sent it

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def __getitems__(self, part: _Seeds) -> list[Any]:
        self._framework.seed(part.seeds)
        if callable(getattr(self._dataset, "__getitems__", None)):
            found: list[Any] = self._dataset.__getitems__(part)
            return found
        return [self._dataset[sample] for sample in part]
