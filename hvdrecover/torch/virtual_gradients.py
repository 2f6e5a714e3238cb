"""The gradients of virtual ranks: taken from each backward pass, added up, and given to one optimizer."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import horovod.torch as hvd
import torch

from hvdrecover.checkpoint.arena import Bytes
from hvdrecover.checkpoint.layout import TensorSpec
from hvdrecover.errors import ConfigError
from hvdrecover.torch.framework import TorchFramework
from hvdrecover.torch.names import parameters_of
from hvdrecover.torch.stepping import stepping
from hvdrecover.virtual.exchange import NOTHING, Exchange, buckets
from hvdrecover.virtual.ranks import OURS

_ALIGNMENT = 64  # bytes
_Taken = list[torch.Tensor | None]
"""The gradients of a bucket; None for a parameter without one."""
# Dtypes of gradients, and how alltoall and allgather send them: Horovod's lack bfloat16.
_SENT = {
    torch.float16: torch.float16,
    torch.bfloat16: torch.float16,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


class Gradients:
    """Takes an optimizer's gradients from each backward pass, and gives it the gradients of the whole job.

    In a step, `begin`; for each virtual rank of this process `part_begins`, backward passes, `part_ends`;
    then `finish`. A bucket of gradients is added up as soon as a backward pass has made it. It is sent while
    the last part's backward pass still runs. A gradient that some virtual ranks lack counts as zeros there.

    Args:
        name: the optimizer's attribute of the state.
        optimizer: wrapped by ``hvd.DistributedOptimizer``; no longer averages gradients by itself.
        size: number of virtual ranks.

    Attributes:
        looks: is given each parameter whose ``grad`` is that of one virtual rank, before it is added up.

    Raises:
        ConfigError: sums of this optimizer's gradients would depend on the number of processes.
    """

    _exchange: Exchange | None = None  # of the step that is under way
    _ended: Exchange | None = None  # of a step whose inner loop has ended
    _part: _Part | None
    _held: _Part | None

    def __init__(self, name: str, optimizer: Any, size: int) -> None:
        _check(name, optimizer)
        self._name = name
        self._optimizer = optimizer
        self._parameters = [each for each in parameters_of(optimizer) if each.requires_grad]
        self._names = [optimizer._parameter_names[each] for each in self._parameters]
        self.looks: Callable[[torch.Tensor], object] = lambda parameter: None
        self._known = set(self._parameters)
        self._divisor = size if optimizer.op == hvd.Average else 1
        halves = optimizer._compression is hvd.Compression.fp16
        self._wires = [torch.float16 if halves else each.dtype for each in self._parameters]
        pairs = list(zip(self._wires, self._parameters, strict=True))
        kinds = [(wire, each.dtype, each.device) for wire, each in pairs]
        self._buckets = buckets(kinds, [wire.itemsize * each.numel() for wire, each in pairs])
        # Places in flat tensors, aligned as torch's own memory: kernels may round differently elsewhere.
        sizes = [
            -(-each.numel() * wire.itemsize // _ALIGNMENT) * _ALIGNMENT // wire.itemsize
            for wire, each in pairs
        ]
        self._offsets = [
            [*accumulate((sizes[place] for place in places), initial=0)] for places in self._buckets
        ]
        self._bucket_of = {place: number for number, places in enumerate(self._buckets) for place in places}
        self._watched = False
        self._collectives = _Collectives()
        # Flat tensors by bucket and partial sum. They are kept, because new pages cost more than sending. So
        # gradients of parameters may be overwritten in the next step.
        self._memory: dict[tuple[int, int], torch.Tensor] = {}
        _take_over(name, optimizer)
        optimizer.virtual_gradients = self
        steps = stepping(optimizer)
        steps.average = self._average
        steps.applying.append(self._applying)
        self.abandon()

    def begin(self, shares: Sequence[int], process: int) -> None:
        """Begin a step, and forget one that was not finished.

        Args:
            shares: number of virtual ranks of each process.
            process: this process.
        """
        self.abandon()
        self._require_known()
        self._optimizer._should_synchronize = True
        if not self._watched:  # only now, so that hooks of others come first and see the gradients
            self._watched = True
            for place, parameter in enumerate(self._parameters):
                frozen = not parameter.requires_grad
                parameter.requires_grad_()  # hooks need it
                parameter.register_post_accumulate_grad_hook(partial(self._arrived, place))  # type: ignore[no-untyped-call]
                parameter.requires_grad_(not frozen)
        for parameter in self._parameters:
            parameter.grad = None
        name, count = f"{OURS}.virtual.{self._name}", len(self._buckets)
        self._exchange = Exchange(self._collectives, name, shares, process, count, _added, self._packed)

    def part_begins(self, rank: int) -> None:
        """Begin the backward passes of a virtual rank."""
        self._part = _Part(rank, [0] * len(self._parameters), [len(places) for places in self._buckets])
        if rank == self._hold:
            self._held = self._part
            self._part.kept = {}

    def part_ends(self) -> None:
        """Take the gradients that had fewer backward passes than the optimizer was told."""
        part = self._part
        assert part is not None
        for bucket, missing in enumerate(part.missing):
            if missing:
                self._take(bucket, part)
        self._part = None

    def finish(self) -> None:
        """Wait for the other processes; then each parameter has the gradient of the job.

        Raises:
            HorovodInternalError: a process was lost.
        """
        self._ended, self._exchange = self._exchange, None
        self._optimizer.synchronize()  # reports it to hooks, and calls `_average`
        self._optimizer._should_synchronize = False

    def abandon(self) -> None:
        """Forget a step that is under way, as after a fault."""
        if self._exchange is not None or self._ended is not None:
            self._collectives.forget()
            self._memory.clear()  # Horovod may still write there
        self._exchange = self._ended = self._part = self._held = None
        self._hold: int | None = None
        self._finished = False

    # -- replays; see `hvdrecover.virtual.replay.Replaying` --------------------------------------------------

    def specs(self) -> list[TensorSpec]:
        """Return dtype, shape and name of each gradient."""
        return [
            TorchFramework().spec(torch.empty((), dtype=wire).expand(parameter.shape), name)
            for wire, parameter, name in zip(self._wires, self._parameters, self._names, strict=True)
        ]

    def packed(self, value: Any) -> bytes:
        """Return a pickle of the inputs of a part."""
        file = io.BytesIO()
        _Pickler(file, protocol=5).dump(value)
        return file.getvalue()

    def hold(self, rank: int) -> None:
        """Keep the gradients of this process's last virtual rank in this step until `release`."""
        self._hold = rank

    def held(self) -> list[Bytes]:
        """Return these gradients, by parameter."""
        assert self._held is not None
        self._given = self._bytes(self._held)
        return self._given

    def release(self) -> None:
        """Add up what `held` returned, which may have been overwritten."""
        part = self._held
        assert part is not None and part.kept is not None
        for bucket, gradients in part.kept.items():
            for place, gradient in zip(self._buckets[bucket], gradients, strict=True):
                assert gradient is not None
                _flat(gradient).copy_(torch.from_numpy(self._given[place]).view(gradient.dtype))
            self._add(bucket, part.rank, gradients)

    def replay_begins(self) -> None:
        """Begin backward passes whose gradients are only compared."""
        self.part_begins(-1)
        assert self._part is not None
        self._part.kept = {}

    def replay_ends(self) -> list[Bytes]:
        """Return their gradients, by parameter."""
        part = self._part
        assert part is not None
        self.part_ends()
        return self._bytes(part)

    def _bytes(self, part: _Part) -> list[Bytes]:
        assert part.kept is not None
        found = {
            place: _flat(gradient).view(torch.uint8).cpu().numpy()
            for bucket, gradients in part.kept.items()
            for place, gradient in zip(self._buckets[bucket], gradients, strict=True)
            if gradient is not None
        }
        return [found[place] for place in range(len(self._parameters))]

    # -- inside ----------------------------------------------------------------------------------------------

    def _require_known(self) -> None:
        """Refuse parameters that came after the optimizer was wrapped: no process adds their gradients up."""
        for each in parameters_of(self._optimizer):
            if each.requires_grad and each not in self._known:
                raise ConfigError(
                    f"state.{self._name}",
                    f"a parameter of shape {tuple(each.shape)} was added, or has begun to require "
                    "gradients, after the state was made. Let all parameters require gradients when you make "
                    "the state, and freeze them afterwards",
                )

    def _arrived(self, place: int, parameter: torch.Tensor) -> None:
        """Count a backward pass; take a bucket when all passes have come for all of it."""
        part = self._part
        if part is None:
            return
        part.passes[place] += 1
        declared = self._optimizer.backward_passes_per_step
        if part.passes[place] > declared:
            raise ConfigError(
                f"state.{self._name}",
                f"{self._names[place]} has had more than "
                f"{declared} backward passes in one virtual rank's part of a step; "
                "tell DistributedOptimizer(backward_passes_per_step=…) how many there are",
            )
        if part.passes[place] == declared:
            bucket = self._bucket_of[place]
            part.missing[bucket] -= 1
            if not part.missing[bucket]:
                self._take(bucket, part)

    def _take(self, bucket: int, part: _Part) -> None:
        """Take the gradients of a bucket away from the parameters."""
        gradients = [self._taken(place, part) for place in self._buckets[bucket]]
        if part.kept is None:
            self._add(bucket, part.rank, gradients)
        else:
            part.kept[bucket] = gradients

    def _taken(self, place: int, part: _Part) -> torch.Tensor | None:
        """Return a gradient as it is added up, in the memory order of its parameter."""
        parameter = self._parameters[place]
        if parameter.grad is None:
            return None if part.kept is None else self._nothing(place)
        if part.rank >= 0:
            self.looks(parameter)
        gradient, parameter.grad = parameter.grad.detach(), None
        if gradient.is_sparse:
            if not self._optimizer.sparse_as_dense:
                raise ConfigError(
                    f"state.{self._name}",
                    f"{self._names[place]} has a sparse gradient, which virtual ranks can't sum up; pass "
                    "DistributedOptimizer(sparse_as_dense=True), or make its layer with sparse=False",
                )
            gradient = gradient.to_dense()
        if gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
        return gradient.to(self._wires[place])

    def _nothing(self, place: int) -> torch.Tensor:
        parameter, wire = self._parameters[place], self._wires[place]
        return torch.full_like(parameter, NOTHING, dtype=wire, requires_grad=False)

    def _add(self, bucket: int, rank: int, gradients: _Taken) -> None:
        assert self._exchange is not None
        self._exchange.add(bucket, rank, gradients)

    def _packed(self, bucket: int, number: int, gradients: _Taken | None) -> torch.Tensor:
        """Return gradients one after the other; see `Exchange`."""
        places = self._buckets[bucket]
        *offsets, length = self._offsets[bucket]
        if (bucket, number) not in self._memory:
            like, wire = self._parameters[places[0]], self._wires[places[0]]
            self._memory[bucket, number] = torch.zeros(length, dtype=wire, device=like.device)
        flat = self._memory[bucket, number]
        for place, offset, gradient in zip(places, offsets, gradients or [None] * len(places), strict=True):
            there = flat[offset : offset + self._parameters[place].numel()]
            there.fill_(NOTHING) if gradient is None else there.copy_(_flat(gradient))
        return flat

    def _unpacked(self, bucket: int, total: torch.Tensor | _Taken) -> _Taken:
        if isinstance(total, list):
            return total  # a single process has not packed it
        found: _Taken = []
        for place, offset in zip(self._buckets[bucket], self._offsets[bucket], strict=False):
            like = torch.empty_like(self._parameters[place], device="meta")
            found.append(total[offset : offset + like.numel()].as_strided(like.shape, like.stride()))
        return found

    def _average(self) -> None:
        """Replace Horovod's ``synchronize``. A script that clips gradients calls it again, to no effect."""
        if self._ended is not None:
            totals, self._ended = self._ended.finish(), None
            self._collectives.handles.clear()
            for bucket, places in enumerate(self._buckets):
                for place, total in zip(places, self._unpacked(bucket, totals[bucket]), strict=True):
                    parameter = self._parameters[place]
                    gradient = (self._nothing(place) if total is None else total).to(parameter.dtype)
                    parameter.grad = gradient if self._divisor == 1 else gradient.div_(self._divisor)
            self._finished = True
        self._require_finished()
        self._optimizer._synchronized = True

    def _applying(self) -> None:
        if not self._optimizer._should_synchronize:  # or else Horovod's `step` synchronizes
            self._require_finished()

    def _require_finished(self) -> None:
        """Refuse a step without gradients of the job."""
        if not self._finished:
            raise ConfigError(
                f"state.{self._name}",
                "stepped, or synchronized, without gradients of a whole step of all virtual ranks; do so "
                "after the inner loop has ended, without a break: for step in state.steps(loader): for part "
                "in step: …",
            )


@dataclass
class _Part:
    """The backward passes of one virtual rank.

    Attributes:
        rank: the virtual rank; -1 if its gradients are only compared.
        passes: number of passes that each parameter has had.
        missing: number of parameters that each bucket waits for.
        kept: all gradients by bucket, if they are not added up yet; None if they are added up at once.
    """

    rank: int
    passes: list[int]
    missing: list[int]
    kept: dict[int, _Taken] | None = None


def _added(left: _Taken, right: _Taken) -> _Taken:
    """Return the sums of gradients. They overwrite the left ones. A missing gradient changes no number."""
    return [
        other if mine is None else mine if other is None else mine.add_(other)
        for mine, other in zip(left, right, strict=True)
    ]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a dense tensor's elements as they are in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


class _Pickler(pickle.Pickler):
    """Sends only a tensor's elements: a slice has the storage of the whole tensor."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is not torch.Tensor or value.layout is not torch.strided:
            return NotImplemented
        if value.untyped_storage().nbytes() <= value.numel() * value.element_size():
            return NotImplemented
        whole = value.detach().clone().requires_grad_(value.requires_grad)
        return whole.__reduce_ex__(5)  # type: ignore[no-untyped-call]


# -- between processes ---------------------------------------------------------------------------------------


class _Collectives:
    """See `hvdrecover.virtual.exchange.Collectives`."""

    exact: Collection[Any] = (torch.float32, torch.float64)

    def __init__(self) -> None:
        self.handles: list[int] = []  # of operations that were not waited for
        self._outputs: dict[str, torch.Tensor] = {}  # kept, like `Gradients._memory`

    def forget(self) -> None:
        """Free the tensors that Horovod keeps for operations after a fault."""
        for handle in self.handles:
            hvd.mpi_ops._handle_map.pop(handle, None)
        self.handles.clear()
        self._outputs.clear()

    def allreduce(self, flat: torch.Tensor, name: str) -> _Pending:
        return self._begun(hvd.allreduce_async_(flat, name=name, op=hvd.Sum), flat)

    def alltoall(self, flat: torch.Tensor, counts: Sequence[int], name: str) -> _Pending:
        sent, splits = flat.view(_SENT[flat.dtype]), torch.tensor(counts, dtype=torch.int32)
        output, process_set = self._output(name, sent), hvd.global_process_set
        handle = hvd.mpi_ops._alltoall_async(sent, splits, output, splits.new_empty(0), name, process_set)
        return self._begun(handle, flat)

    def allgather(self, flat: torch.Tensor, name: str) -> _Pending:
        sent = flat.view(_SENT[flat.dtype])
        output = self._output(name, sent)
        return self._begun(hvd.mpi_ops._allgather_async(sent, output, name, hvd.global_process_set), flat)

    def _output(self, name: str, like: torch.Tensor) -> torch.Tensor:
        return self._outputs.setdefault(name, like.new_empty(0))  # Horovod resizes it

    def joined(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(flats))

    def _begun(self, handle: int, flat: torch.Tensor) -> _Pending:
        self.handles.append(handle)
        return _Pending(handle, flat.dtype)


@dataclass(frozen=True)
class _Pending:
    """See `hvdrecover.virtual.exchange.Pending`."""

    handle: int
    dtype: torch.dtype

    def ready(self) -> bool:
        return bool(hvd.poll(self.handle))

    def wait(self) -> torch.Tensor:
        found = hvd.synchronize(self.handle)
        result: torch.Tensor = (
            found[0] if isinstance(found, tuple) else found
        )  # alltoall returns sizes as well
        return result.view(self.dtype)


# -- Horovod's optimizer -------------------------------------------------------------------------------------


def _check(name: str, optimizer: Any) -> None:
    """Refuse an optimizer whose gradients virtual ranks cannot add up."""
    if hasattr(optimizer, "virtual_gradients"):
        problem = "another state with virtual ranks has it; make a new DistributedOptimizer for this one"
    elif hasattr(optimizer, "_starting_models"):
        problem = "Adasum combines updates of processes, not gradients; pass op=Average or op=Sum"
    elif not hasattr(optimizer, "_allreduce_grad_async"):
        problem = "virtual ranks need its gradients; wrap it in DistributedOptimizer"
    elif optimizer.op not in (hvd.Average, hvd.Sum):
        problem = "virtual ranks average gradients or sum them up; pass op=Average or op=Sum"
    elif optimizer.process_set.process_set_id != 0:
        problem = "virtual ranks are those of the whole job; leave out process_set"
    elif optimizer.gradient_predivide_factor != 1.0:
        problem = (
            "gradients of virtual ranks are divided once, after the sum; leave out gradient_predivide_factor"
        )
    elif optimizer._compression not in (hvd.Compression.none, hvd.Compression.fp16):
        problem = (
            f"a sum of what {optimizer._compression!r} makes would depend on the number of processes; "
            "pass Compression.none or Compression.fp16"
        )
    elif strange := {each.dtype for each in parameters_of(optimizer) if each.requires_grad} - _SENT.keys():
        problem = f"virtual ranks can't add up gradients of {strange.pop()}; use a floating-point dtype"
    else:
        return
    raise ConfigError(f"state.{name}", problem)


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
