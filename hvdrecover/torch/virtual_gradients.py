"""The gradients of virtual ranks: taken when each part ends, added up, and given to one optimizer."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import horovod.torch as hvd
import torch

from hvdrecover.errors import ConfigError
from hvdrecover.torch.optimizers import parameters_of
from hvdrecover.torch.stepping import averages, is_adasum, steps_of
from hvdrecover.virtual.exchange import NOTHING, Exchange, buckets
from hvdrecover.virtual.ranks import OURS

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


class Gradients:
    """Takes an optimizer's gradients from each part, and gives it the gradients of the whole job.

    In a step, `begin`; for each virtual rank of this process `part_begins`, backward passes, `part_ends`;
    then `finish`. A gradient that some virtual ranks lack counts as zeros there. The optimizer no longer
    averages gradients by itself.
    """

    _exchange: Exchange | None = None  # of the step that is under way
    _ended: Exchange | None = None  # of a step whose inner loop has ended

    def __init__(self, name: str, optimizer: Any, size: int) -> None:
        _check(name, optimizer)
        self._name = name
        self._optimizer = optimizer
        self._parameters = [each for each in parameters_of(optimizer) if each.requires_grad]
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
        self._collectives = _Collectives()
        # Flat tensors by bucket and partial sum. They are kept, because new pages cost more than sending. So
        # gradients of parameters may be overwritten in the next step.
        self._memory: dict[tuple[int, int], torch.Tensor] = {}
        _take_over(name, optimizer)
        optimizer.virtual_gradients = self
        self.abandon()

    def begin(self, shares: Sequence[int], process: int) -> None:
        """Begin a step with these shares on this process, and forget one that was not finished."""
        self.abandon()
        self._require_known()
        self._optimizer._should_synchronize = True
        for parameter in self._parameters:
            parameter.grad = None
        name, count = f"{OURS}.virtual.{self._name}", len(self._buckets)
        self._exchange = Exchange(self._collectives, name, shares, process, count, _added, self._packed)

    def part_begins(self, rank: int) -> None:
        """Begin the backward passes of a virtual rank."""
        self._rank = rank

    def part_ends(self) -> None:
        """Take the gradients of the virtual rank."""
        for listener in steps_of(self._optimizer).sending:
            for parameter in self._parameters:
                listener(parameter)
        self._add(self._rank, self._take())

    def finish(self) -> None:
        """Wait for the other processes; then each parameter has the gradient of the job."""
        self._ended, self._exchange = self._exchange, None
        self._optimizer.synchronize()  # reports it to listeners, and calls `average`
        self._optimizer._should_synchronize = False

    def abandon(self) -> None:
        """Forget a step that is under way, as after a fault."""
        if self._exchange is not None or self._ended is not None:
            self._collectives.forget()
            self._memory.clear()  # Horovod may still write there
        self._exchange = self._ended = None
        self._finished = False

    def average(self) -> None:
        """Do Horovod's ``synchronize``. A script that clips gradients calls it again, to no effect."""
        if self._ended is not None:
            totals, self._ended = self._ended.finish(), None
            self._collectives.handles.clear()
            for bucket, total in enumerate(totals):
                self._give(bucket, total)
            self._finished = True
        self.require_finished()
        self._optimizer._synchronized = True

    def require_finished(self) -> None:
        """Refuse a step without gradients of the job."""
        if not self._finished:
            raise ConfigError(
                f"state.{self._name}",
                "stepped, or synchronized, without gradients of a whole step of all virtual ranks; do so "
                "after the inner loop has ended, without a break: for step in state.steps(loader): for part "
                "in step: …",
            )

    # -- inside ----------------------------------------------------------------------------------------------

    def _require_known(self) -> None:
        """Refuse parameters that came after the optimizer was wrapped: no process adds their gradients up."""
        known = set(self._parameters)
        for each in parameters_of(self._optimizer):
            if each.requires_grad and each not in known:
                raise ConfigError(
                    f"state.{self._name}",
                    f"a parameter of shape {tuple(each.shape)} was added, or has begun to require "
                    "gradients, after the state was made. Let all parameters require gradients when you make "
                    "the state, and freeze them afterwards",
                )

    def _take(self) -> _Taken:
        """Take the gradients away from the parameters, in the dtypes in which they are added up."""
        taken: _Taken = []
        for parameter, wire in zip(self._parameters, self._wires, strict=True):
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
            taken.append(None if gradient is None else gradient.detach().to(wire))
        return taken

    def _add(self, rank: int, gradients: _Taken) -> None:
        assert self._exchange is not None
        for bucket, places in enumerate(self._buckets):
            self._exchange.add(bucket, rank, [gradients[place] for place in places])

    def _packed(self, bucket: int, number: int, gradients: _Taken | None) -> torch.Tensor:
        """Return gradients one after the other; see `Exchange`."""
        places = self._buckets[bucket]
        *offsets, length = self._offsets[bucket]
        if (bucket, number) not in self._memory:
            like, wire = self._parameters[places[0]], self._wires[places[0]]
            self._memory[bucket, number] = torch.zeros(length, dtype=wire, device=like.device)
        flat = self._memory[bucket, number]
        for place, offset, gradient in zip(places, offsets, gradients or [None] * len(places), strict=True):
            there = self._part_of(flat, offset, place)
            there.fill_(NOTHING) if gradient is None else there.copy_(gradient)
        return flat

    def _give(self, bucket: int, total: torch.Tensor | _Taken) -> None:
        """Give the parameters of a bucket their gradients."""
        places = self._buckets[bucket]
        if isinstance(total, torch.Tensor):  # a single process has not packed it
            offsets = self._offsets[bucket]
            total = [
                self._part_of(total, offset, place) for place, offset in zip(places, offsets, strict=False)
            ]
        for place, each in zip(places, total, strict=True):
            parameter = self._parameters[place]
            gradient = (self._nothing(place) if each is None else each).to(parameter.dtype)
            if gradient.stride() != parameter.stride():  # fused optimizers need their parameter's order
                gradient = torch.empty_like(parameter, requires_grad=False).copy_(gradient)
            parameter.grad = gradient if self._divisor == 1 else gradient.div_(self._divisor)

    def _part_of(self, flat: torch.Tensor, offset: int, place: int) -> torch.Tensor:
        parameter = self._parameters[place]
        return flat[offset : offset + parameter.numel()].view(parameter.shape)

    def _nothing(self, place: int) -> torch.Tensor:
        parameter, wire = self._parameters[place], self._wires[place]
        return torch.full_like(parameter, NOTHING, dtype=wire, requires_grad=False)


def _added(left: _Taken, right: _Taken) -> _Taken:
    """Return the sums of gradients. They overwrite the left ones. A missing gradient changes no number."""
    return [
        other if mine is None else mine if other is None else mine.add_(other)
        for mine, other in zip(left, right, strict=True)
    ]


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

    def wait(self) -> torch.Tensor:
        found = hvd.synchronize(self.handle)
        result: torch.Tensor = found[0] if isinstance(found, tuple) else found  # alltoall's has sizes as well
        return result.view(self.dtype)


# -- Horovod's optimizer -------------------------------------------------------------------------------------


def _check(name: str, optimizer: Any) -> None:
    """Refuse an optimizer whose gradients virtual ranks cannot add up."""
    if hasattr(optimizer, "virtual_gradients"):
        problem = "another state with virtual ranks has it; make a new DistributedOptimizer for this one"
    elif is_adasum(optimizer):
        problem = "Adasum combines updates of processes, not gradients; pass op=Average or op=Sum"
    elif not averages(optimizer):
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
