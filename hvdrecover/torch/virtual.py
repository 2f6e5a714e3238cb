"""Virtual ranks in torch: their buffers, their batches, and the sum of their gradients.

The gradients of each part are taken when it ends, added up, and given to the optimizer at the end of a step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import horovod.torch as hvd
import torch
from torch.utils.data import BatchSampler, DataLoader

from hvdrecover.data.order import SampleOrder
from hvdrecover.errors import ConfigError
from hvdrecover.state.adapter import Framework
from hvdrecover.state.rank_local import PerRank, is_sampler
from hvdrecover.torch.framework import all_equal
from hvdrecover.torch.optimizers import parameters_of
from hvdrecover.torch.stepping import averages, refuse_late, steps_of, tell
from hvdrecover.virtual import ranks, steps
from hvdrecover.virtual.exchange import NOTHING, RunningSum, add_up, buckets, side_by_side
from hvdrecover.virtual.ranks import OURS, Policy, VirtualRanks
from hvdrecover.virtual.steps import Batches, Feed, Part, aside, deal, streams

_ALIGNMENT = 64  # bytes
_Taken = list[torch.Tensor | None]
"""Gradients by parameter; None for a parameter without one."""
# Dtypes of gradients, and how alltoall and allgather send them: Horovod's lack bfloat16.
_SENT = {
    torch.float16: torch.float16,
    torch.bfloat16: torch.float16,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


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

    def begin(*arguments: Any) -> Any:
        if not any(isinstance(each, bytes) and each.startswith(OURS.encode()) for each in arguments):
            ranks.refuse(call)
        return function(*arguments)

    return begin


class Buffers(steps.Buffers):
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
    """Deal the batches of a data loader out, one sample to each virtual rank in turn."""
    order: SampleOrder = loader.sampler.order  # type: ignore[attr-defined]
    size: int = loader.batch_size  # type: ignore[assignment]

    def read(parts: Iterable[Part]) -> Iterator[Any]:
        # The random streams are the virtual rank's, whichever of the loader's processes fetches a sample.
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


# -- gradients -----------------------------------------------------------------------------------------------


@dataclass
class _Bucket:
    """The gradients that are sent in one flat tensor."""

    dtype: torch.dtype
    device: torch.device
    shapes: dict[int, torch.Size]  # by the place of the parameter
    # Flat tensors by the number of the partial sum. They are kept, because new pages cost more than sending.
    # So gradients of parameters may be overwritten in the next step.
    memory: dict[int, torch.Tensor] = field(default_factory=dict)

    def packed(self, number: int, gradients: _Taken) -> torch.Tensor:
        """Return gradients one after the other."""
        if number not in self.memory:
            self.memory[number] = torch.zeros(sum(self._sizes()), dtype=self.dtype, device=self.device)
        for place, part in self.parts(self.memory[number]):
            gradient = gradients[place]
            part.fill_(NOTHING) if gradient is None else part.copy_(gradient)
        return self.memory[number]

    def parts(self, flat: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the places of parameters, and their parts of a flat tensor."""
        for (place, shape), part in zip(self.shapes.items(), torch.split(flat, self._sizes()), strict=True):
            yield place, part[: shape.numel()].view(shape)

    def _sizes(self) -> list[int]:
        # Aligned as torch's own memory: kernels may round differently elsewhere.
        unit = _ALIGNMENT // self.dtype.itemsize
        return [-(-shape.numel() // unit) * unit for shape in self.shapes.values()]


class Gradients:
    """Takes the gradients of each part away, and gives the optimizer the gradients of the whole job."""

    def __init__(self, name: str, optimizer: Any, size: int) -> None:
        _check(name, optimizer)
        self._name = name
        self._optimizer = optimizer
        self._size = size
        self._parameters = [each for each in parameters_of(optimizer) if each.requires_grad]
        self._divisor = size if optimizer.op == hvd.Average else 1
        halves = optimizer._compression is hvd.Compression.fp16
        self._dtypes = [torch.float16 if halves else each.dtype for each in self._parameters]
        pairs = list(zip(self._dtypes, self._parameters, strict=True))
        kinds = [(dtype, each.device) for dtype, each in pairs]
        self._buckets = [
            _Bucket(*kinds[places[0]], {place: self._parameters[place].shape for place in places})
            for places in buckets(kinds, [dtype.itemsize * each.numel() for dtype, each in pairs])
        ]
        self._collectives = _Collectives()
        self._sums: RunningSum[_Taken] | None = None  # of the step that is under way
        self._finished = False
        _take_over(name, optimizer)
        optimizer.virtual_gradients = self

    def begin(self) -> None:
        self.abandon()
        refuse_late(self._optimizer, set(self._parameters), f"state.{self._name}", "state was made")
        for parameter in self._parameters:
            parameter.grad = None
        self._sums = RunningSum(self._size, _added)

    def part_ends(self, rank: int) -> None:
        for listener in steps_of(self._optimizer).sending:
            for parameter in self._parameters:
                listener(parameter)
        assert self._sums is not None
        self._sums.push(range(rank, rank + 1), self._take())

    def finish(self, shares: Sequence[int], process: int) -> None:
        assert self._sums is not None
        steps = steps_of(self._optimizer)
        tell(steps.averaging)
        for place, total in self._totals(self._sums.values, shares, process):
            parameter = self._parameters[place]
            if total is None:
                gradient = torch.full_like(parameter, NOTHING, requires_grad=False)
            else:
                gradient = total.to(parameter.dtype)
            if gradient.stride() != parameter.stride():  # fused optimizers need their parameter's order
                gradient = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
            parameter.grad = gradient if self._divisor == 1 else gradient.div_(self._divisor)
        self._sums, self._finished = None, True
        tell(steps.averaged)

    def abandon(self) -> None:
        if self._sums is not None:  # Horovod may still write there
            for bucket in self._buckets:
                bucket.memory.clear()
            self._collectives.forget()
        self._sums, self._finished = None, False

    def require_finished(self) -> None:
        """Refuse a step without gradients of the job."""
        if not self._finished:
            raise ConfigError(
                f"state.{self._name}",
                "stepped, or synchronized, without gradients of a whole step of all virtual ranks; do so "
                "after the inner loop has ended, without a break: for step in state.steps(loader): for part "
                "in step: …",
            )

    def _take(self) -> _Taken:
        """Take the gradients away from the parameters, in the dtypes in which they are added up."""
        taken: _Taken = []
        for parameter, dtype in zip(self._parameters, self._dtypes, strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None and gradient.is_sparse:
                if not self._optimizer.sparse_as_dense:
                    raise ConfigError(
                        f"state.{self._name}",
                        f"{self._optimizer._parameter_names[parameter]} has a sparse gradient, which virtual "
                        "ranks can't sum up; pass DistributedOptimizer(sparse_as_dense=True), or make its "
                        "layer with sparse=False",
                    )
                gradient = gradient.to_dense()
            taken.append(None if gradient is None else gradient.detach().to(dtype))
        return taken

    def _totals(
        self, sums: Sequence[_Taken], shares: Sequence[int], process: int
    ) -> Iterator[tuple[int, torch.Tensor | None]]:
        """Yield the places of parameters, and the sums of all virtual ranks."""
        if len(shares) == 1:
            yield from enumerate(sums[0])
            return
        nothing: _Taken = [None] * len(self._parameters)

        def additions() -> Iterator[Generator[None, None, torch.Tensor]]:
            for number, bucket in enumerate(self._buckets):
                flats = [bucket.packed(partial, each) for partial, each in enumerate(sums or [nothing])]
                name = f"{OURS}.virtual.{self._name}.{number}"
                yield add_up(self._collectives, name, shares, process, flats)

        for bucket, total in zip(self._buckets, side_by_side(additions()), strict=True):
            yield from bucket.parts(total)


def _added(left: _Taken, right: _Taken) -> _Taken:
    """Return the sums of gradients. They overwrite the left ones. A missing gradient changes no number."""
    return [
        other if mine is None else mine if other is None else mine.add_(other)
        for mine, other in zip(left, right, strict=True)
    ]


class _Collectives:
    exact: Collection[Any] = (torch.float32, torch.float64)

    def __init__(self) -> None:
        self._outputs: dict[str, torch.Tensor] = {}  # kept, like `_Bucket.memory`
        self._under_way: set[int] = set()  # handles

    def allreduce(self, flat: torch.Tensor, name: str) -> Callable[[], torch.Tensor]:
        return self._begun(hvd.allreduce_async_(flat, name=name, op=hvd.Sum), flat.dtype)

    def alltoall(self, flat: torch.Tensor, counts: Sequence[int], name: str) -> Callable[[], torch.Tensor]:
        sent, splits = flat.view(_SENT[flat.dtype]), torch.tensor(counts, dtype=torch.int32)
        output, process_set = self._output(name, sent), hvd.global_process_set
        handle = hvd.mpi_ops._alltoall_async(sent, splits, output, splits.new_empty(0), name, process_set)
        return self._begun(handle, flat.dtype)

    def allgather(self, flat: torch.Tensor, name: str) -> Callable[[], torch.Tensor]:
        sent = flat.view(_SENT[flat.dtype])
        output = self._output(name, sent)
        handle = hvd.mpi_ops._allgather_async(sent, output, name, hvd.global_process_set)
        return self._begun(handle, flat.dtype)

    def _output(self, name: str, like: torch.Tensor) -> torch.Tensor:
        return self._outputs.setdefault(name, like.new_empty(0))  # Horovod resizes it

    def _begun(self, handle: int, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        self._under_way.add(handle)

        def result() -> torch.Tensor:
            found = hvd.synchronize(handle)
            self._under_way.discard(handle)
            # The result of an alltoall comes with sizes.
            received: torch.Tensor = found[0] if isinstance(found, tuple) else found
            return received.view(dtype)

        return result

    def forget(self) -> None:
        """Free all memory after a fault; Horovod would keep the tensors that are under way for ever."""
        for handle in self._under_way:
            hvd.mpi_ops._handle_map.pop(handle, None)
        self._under_way.clear()
        self._outputs.clear()


def _check(name: str, optimizer: Any) -> None:
    """Refuse an optimizer whose gradients virtual ranks cannot add up."""
    fits = (
        averages(optimizer)
        and optimizer.op in (hvd.Average, hvd.Sum)
        and optimizer._compression in (hvd.Compression.none, hvd.Compression.fp16)
        and optimizer.process_set.process_set_id == 0
        and optimizer.gradient_predivide_factor == 1.0
        and {each.dtype for each in parameters_of(optimizer) if each.requires_grad} <= _SENT.keys()
    )
    if not fits:
        raise ConfigError(
            f"state.{name}",
            "virtual ranks add its gradients up. Wrap it in DistributedOptimizer with op=Average or op=Sum, "
            "with Compression.none or Compression.fp16, and without process_set and "
            "gradient_predivide_factor. Its parameters must be real floating-point numbers",
        )


def _take_over(name: str, optimizer: Any) -> None:
    """Keep Horovod's optimizer from sending gradients: virtual ranks add them up."""

    def send(*arguments: Any) -> Any:
        raise ConfigError(
            f"state.{name}", "a loss from before the state was made is still there; delete it before"
        )

    # Only these references keep the nodes alive that Horovod's hooks are on, unless a graph does.
    optimizer._grad_accs.clear()
    optimizer._allreduce_grad_async = optimizer._grouped_allreduce_grad_async = send
    optimizer._requires_update.clear()
    optimizer._handles = {}
    optimizer._groups, optimizer._p_to_group, optimizer._group_counts = None, {}, {}
