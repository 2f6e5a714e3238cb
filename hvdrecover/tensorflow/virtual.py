"""Virtual ranks in loops of the user's own: their buffers, batches, steps and sums of gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

from hvdrecover.errors import ConfigError, StepError
from hvdrecover.state.adapter import Framework
from hvdrecover.state.rank_local import PerRank
from hvdrecover.tensorflow.averaging import own, sums_of
from hvdrecover.tensorflow.collectives import in_python
from hvdrecover.tensorflow.dataset import ElasticDataset
from hvdrecover.tensorflow.optimizer import is_distributed
from hvdrecover.tensorflow.variables import Gradient, Variable, name_of, named, raw
from hvdrecover.virtual import ranks, steps
from hvdrecover.virtual.exchange import NOTHING, RunningSum, add_up, buckets, side_by_side
from hvdrecover.virtual.ranks import OURS, Counts, Policy, VirtualRanks

_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
Flat = list[tf.Tensor]
"""The gradients of all variables: a one-dimensional tensor for each bucket."""


def virtual_ranks(components: Mapping[str, Any], size: int, policy: Policy | None) -> VirtualRanks:
    for name, each in components.items():
        if is_distributed(each):
            raise ConfigError(
                f"state.{name}",
                "it averages gradients over processes, and state.steps() does over virtual ranks; leave "
                "out DistributedOptimizer",
            )
    layers = {name: each for name, each in components.items() if isinstance(each, keras.layers.Layer)}
    ranks.watch(hvd.mpi_ops, "MPI_LIB", _guarded)  # for functions that are traced from now on, too
    return VirtualRanks(size, policy, _Buffers(layers), [Gradients(size)])


def gradients_of(virtual: VirtualRanks) -> Gradients:
    (gradients,) = virtual.gradients
    assert isinstance(gradients, Gradients)
    return gradients


class Step(steps.Step):
    """One step of all virtual ranks. Iterate over it, once: over the batches of those of this process."""

    def add(self, gradients: Sequence[Gradient]) -> None:
        """Hand over the gradients of the virtual rank that is being carried out; several calls add up.

        Args:
            gradients: one for each variable, as ``tape.gradient(loss, model.trainable_variables)`` gives
                them; sparse ones are made dense, None counts as zeros.

        Raises:
            StepError: none is being carried out, or there are more or fewer gradients than variables.
        """
        if self._ranks.current is None:
            raise StepError("step.add()", "no virtual rank is being carried out; call it in the inner loop")
        gradients_of(self._ranks).add(gradients)

    def gradients(self) -> list[tf.Tensor]:
        """Return the gradients of the whole job, one for each variable, when the inner loop has ended.

        Raises:
            StepError: it has not.
        """
        return gradients_of(self._ranks).result()


def _guarded(call: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a collective of Horovod's library that refuses the script's calls in a virtual rank's part."""
    refuse = functools.partial(ranks.refuse, call)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def begin(*arguments: Any, **options: Any) -> Any:
        if str(options.get("name")).startswith(OURS):
            return function(*arguments, **options)
        if tf.executing_eagerly():
            refuse()
            return function(*arguments, **options)
        with tf.control_dependencies([in_python(refuse, [], [])]):
            return function(*arguments, **options)

    unconverted: Callable[..., Any] = begin
    return unconverted


class _Buffers(steps.Buffers):
    """The variables that are not trained, without seeds: each part has its own."""

    def __init__(self, layers: Mapping[str, keras.layers.Layer]) -> None:
        self._variables = {
            f"{attribute}.{name}": variable
            for attribute, layer in layers.items()
            for name, variable in named(layer).items()
            if not variable.trainable
        }
        super().__init__()

    def names(self) -> Iterable[str]:
        return self._variables.keys()

    def read(self, name: str) -> tf.Tensor:
        variable = self._variables[name]
        # The tensor shares memory with the variable until the variable is assigned.
        return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)

    def write(self, name: str, tensor: tf.Tensor) -> None:
        tf.raw_ops.AssignVariableOp(resource=self._variables[name].handle, value=tensor)

    def same(self, one: tf.Tensor, other: tf.Tensor) -> bool:
        mine, others = one.numpy(), other.numpy()
        return bool(mine.shape == others.shape and mine.tobytes() == others.tobytes())


def feed(data: Any, tracked: Mapping[str, Any], framework: Framework) -> steps.Feed:
    """Return the source of a loop's batches: of an elastic data set, or of a `PerRank`, of the state."""
    if not any(data is each for each in tracked.values()) or not isinstance(data, PerRank | ElasticDataset):
        raise ConfigError(
            "state.steps()",
            f"a {type(data).__name__} can't be dealt out to virtual ranks; pass a data set made by "
            "elastic_dataset() that is in the state, or a PerRank of the state",
        )
    if isinstance(data, PerRank):
        return lambda ranks: steps.streams(data, ranks, framework)
    # The data set deals its samples out by itself, in the same way.
    return lambda ranks: steps.deal(
        data.order, data.batch_size, ranks, lambda parts: data.batches(ranks.carried.ranks)
    )


class Gradients:
    """Adds up the gradients that the script hands over for each virtual rank, and averages them."""

    _sums: RunningSum[Flat]
    _part: Flat | None = None  # the sum of the present part's gradients
    _result: list[tf.Tensor] | None = None

    def __init__(self, size: int) -> None:
        self._size = size

    def of(self, variables: Sequence[Variable], op: Any, compression: Any) -> None:
        if op not in (hvd.Average, hvd.Sum):
            problem = "virtual ranks average gradients or sum them up; pass op=Average or op=Sum"
            raise ConfigError("op", problem)
        if compression not in (hvd.Compression.none, hvd.Compression.fp16):
            raise ConfigError(
                "compression",
                f"a sum of what {compression!r} makes would depend on the number of processes; pass "
                "Compression.none or Compression.fp16",
            )
        if not variables:
            raise ConfigError("variables", "there is nothing to train; pass variables=[...]")
        dtypes = [raw(each).dtype for each in variables]
        for each, dtype in zip(variables, dtypes, strict=True):
            if dtype not in _DTYPES:
                raise ConfigError("variables", f"{name_of(each)} is {dtype.name}, which has no gradient")
        self._variables = list(variables)
        self._divisor = self._size if op == hvd.Average else 1
        self._halves = compression == hvd.Compression.fp16  # adds up and sends float16
        self._sizes = [int(raw(each).shape.num_elements()) for each in variables]
        nbytes = [dtype.size * size for dtype, size in zip(dtypes, self._sizes, strict=True)]
        self._buckets = [(dtypes[places[0]], places) for places in buckets(dtypes, nbytes)]
        self._packed = tf.function(self._pack, autograph=False)
        self._added = tf.function(self._add, autograph=False)
        self._unpacked = tf.function(self._unpack, autograph=False)

    def begin(self) -> None:
        self.abandon()
        # Its order is fixed: see `hvdrecover.virtual.exchange`.
        self._sums = RunningSum(self._size, self._added)
        # The variables whose gradients of this process were all finite.
        self._finite = np.ones(len(self._variables), bool)

    def add(self, gradients: Sequence[Gradient]) -> None:
        given = [each if each is None else tf.convert_to_tensor(each) for each in gradients]
        if len(given) != len(self._variables):
            raise StepError(
                "step.add()",
                f"{len(given)} gradients of {len(self._variables)} variables; pass one for each of "
                "state.steps(..., variables=...), which are the model's trainable ones if it does not say",
            )
        there = [place for place, each in enumerate(given) if each is not None]
        if own.wanted and there:
            self._finite[there] &= np.isfinite(sums_of([given[place] for place in there]).numpy())
        flat = self._packed(given)
        self._part = flat if self._part is None else self._added(self._part, flat)

    def part_ends(self, rank: int) -> None:
        part, self._part = self._part, None
        if part is None:
            raise StepError(
                "state.steps()",
                f"virtual rank {rank} has no gradients in this step; hand them over in the inner loop: "
                "step.add(gradients)",
            )
        self._sums.push(range(rank, rank + 1), self._sent(part))

    def finish(self, counts: Counts, process: int) -> None:
        partial = self._sums.values or [self._sent(self._pack([None] * len(self._variables)))]
        totals = side_by_side(
            add_up(_Collectives(), f"{OURS}.virtual.{number}", counts, process, each)
            for number, each in enumerate(zip(*partial, strict=True))
        )
        wide = [tf.cast(each, dtype) for each, (dtype, _) in zip(totals, self._buckets, strict=True)]
        self._result = self._unpacked([each / tf.constant(self._divisor, each.dtype) for each in wide])
        if own.wanted:
            own.note(np.where(self._finite, 0.0, np.nan).astype(np.float32), self._variables)

    def abandon(self) -> None:
        self._result = self._part = None

    def result(self) -> list[tf.Tensor]:
        """Return the gradients of the whole job; zeros where no virtual rank has one."""
        if self._result is None:
            raise StepError("step.gradients()", "they are there when the inner loop has ended")
        return list(self._result)

    def _pack(self, gradients: Sequence[Gradient]) -> Flat:
        flat = []
        for dtype, places in self._buckets:
            parts = [
                tf.fill([self._sizes[place]], tf.constant(NOTHING, dtype))
                if gradients[place] is None
                else tf.reshape(tf.cast(gradients[place], dtype), [-1])
                for place in places
            ]
            flat.append(tf.concat(parts, 0))
        return flat

    def _add(self, left: Flat, right: Flat) -> Flat:
        return [mine + other for mine, other in zip(left, right, strict=True)]

    def _sent(self, flat: Flat) -> Flat:
        return [tf.cast(each, tf.float16) for each in flat] if self._halves else flat

    def _unpack(self, flat: Flat) -> list[tf.Tensor]:
        gradients: dict[int, tf.Tensor] = {}
        for each, (_, places) in zip(flat, self._buckets, strict=True):
            parts = tf.split(each, [self._sizes[place] for place in places])
            for place, part in zip(places, parts, strict=True):
                gradients[place] = tf.reshape(part, raw(self._variables[place]).shape)
        return [gradients[place] for place in range(len(self._variables))]


class _Collectives:  # see `hvdrecover.virtual.exchange.Collectives`
    exact: Collection[Any] = (tf.float32, tf.float64)

    # Horovod's operations on eager tensors return when they are done.

    def allreduce(self, flat: tf.Tensor, name: str) -> Callable[[], tf.Tensor]:
        total = hvd.allreduce(flat, op=hvd.Sum, name=name)
        return lambda: total

    def alltoall(self, flat: tf.Tensor, counts: Sequence[int], name: str) -> Callable[[], tf.Tensor]:
        received, _ = hvd.alltoall(_as_sent(flat), splits=tf.constant(counts, tf.int32), name=name)
        return lambda: tf.bitcast(received, flat.dtype)

    def allgather(self, flat: tf.Tensor, name: str) -> Callable[[], tf.Tensor]:
        gathered = hvd.allgather(_as_sent(flat), name=name)
        return lambda: tf.bitcast(gathered, flat.dtype)


def _as_sent(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor of a dtype that Horovod can send."""
    return tf.bitcast(tensor, tf.uint16) if tensor.dtype == tf.bfloat16 else tensor
