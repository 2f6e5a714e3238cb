"""The gradients of virtual ranks: handed over by the script, added up, and averaged."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdrecover.errors import ConfigError, StepError
from hvdrecover.tensorflow.own_gradients import Gradient, own, sums
from hvdrecover.tensorflow.variables import Variable, name_of, raw
from hvdrecover.virtual.exchange import NOTHING, Done, Exchange, buckets
from hvdrecover.virtual.ranks import OURS
from hvdrecover.virtual.shares import Counts

_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
Flat = list[tf.Tensor]
"""The gradients of all variables: a one-dimensional tensor for each bucket."""


class Layout:
    """The places of gradients in a few flat tensors, one for each bucket.

    The last elements of the first one are a number for each variable: how many virtual ranks have a gradient.

    Args:
        variables: the variables.
        compression: of ``hvd.Compression``; ``hvd.Compression.fp16`` adds up and sends float16.

    Attributes:
        missing: for each bucket, makes a tensor that stands for no gradients.

    Raises:
        ConfigError: virtual ranks cannot add up a variable's dtype, or compressed gradients.
    """

    def __init__(self, variables: Sequence[Variable], compression: Any) -> None:
        if compression not in (hvd.Compression.none, hvd.Compression.fp16):
            raise ConfigError(
                "compression",
                f"a sum of what {compression!r} makes would depend on the number of processes; pass "
                "Compression.none or Compression.fp16",
            )
        dtypes = [raw(each).dtype for each in variables]
        for each, dtype in zip(variables, dtypes, strict=True):
            if dtype not in _DTYPES:
                raise ConfigError("variables", f"{name_of(each)} is {dtype.name}, which has no gradient")
        self.variables = list(variables)
        self._sizes = [int(raw(each).shape.num_elements()) for each in variables]
        nbytes = [dtype.size * size for dtype, size in zip(dtypes, self._sizes, strict=True)]
        self._buckets = buckets(dtypes, nbytes)
        self._dtypes = [dtypes[places[0]] for places in self._buckets]
        halves = compression == hvd.Compression.fp16
        self._sent_dtypes = [tf.float16 if halves else dtype for dtype in self._dtypes]
        self.packed = tf.function(self._packed, autograph=False)
        self.sent = tf.function(self._sent, autograph=False)
        self.added = tf.function(self._added, autograph=False)
        self._unpacked = tf.function(self._taken_apart, autograph=False)
        none = partial(self._packed, [None] * len(variables))
        self.missing: list[Callable[[], tf.Tensor]] = [
            lambda bucket=bucket: self._sent(none())[bucket]  # type: ignore[misc]
            for bucket in range(len(self._buckets))
        ]

    def average(self, totals: Flat, divisor: int) -> list[Gradient]:
        """Return the gradients that are in flat tensors, divided; None where there was none at all."""
        wide = [tf.cast(each, dtype) for each, dtype in zip(totals, self._dtypes, strict=True)]
        counts, gradients = self._unpacked(wide, [tf.constant(divisor, each.dtype) for each in wide])
        there = (counts.numpy() > 0).tolist()
        return [gradient if here else None for gradient, here in zip(gradients, there, strict=True)]

    def _packed(self, gradients: Sequence[Gradient]) -> Flat:
        """Flat tensors, in the variables' dtypes."""
        flat = []
        for number, (dtype, places) in enumerate(zip(self._dtypes, self._buckets, strict=True)):
            parts = [
                tf.fill([self._sizes[place]], tf.constant(NOTHING, dtype))
                if gradients[place] is None
                else tf.reshape(tf.cast(gradients[place], dtype), [-1])
                for place in places
            ]
            if not number:
                parts.append(tf.constant([float(each is not None) for each in gradients], dtype))
            flat.append(tf.concat(parts, 0))
        return flat

    def _sent(self, flat: Flat) -> Flat:
        """Flat tensors as they are added up, and sent."""
        return [tf.cast(each, dtype) for each, dtype in zip(flat, self._sent_dtypes, strict=True)]

    def _added(self, left: Flat, right: Flat) -> Flat:
        return [mine + other for mine, other in zip(left, right, strict=True)]

    def _taken_apart(self, flat: Flat, divisors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        counts = flat[0][-len(self.variables) :]
        gradients: dict[int, tf.Tensor] = {}
        for each, divisor, places in zip(flat, divisors, self._buckets, strict=True):
            sizes = [self._sizes[place] for place in places]
            given = (each / divisor)[: sum(sizes)]
            for place, part in zip(places, tf.split(given, sizes), strict=True):
                gradients[place] = tf.reshape(part, raw(self.variables[place]).shape)
        return counts, [gradients[place] for place in range(len(self.variables))]


class Gradients:
    """Adds up the gradients of the virtual ranks, which the script hands over, and averages those of all.

    In a step, `begin`; for each virtual rank of this process `part_begins`, `add`, `part_ends`; then `finish`
    and `result`.

    Args:
        size: number of virtual ranks.
    """

    _layout: Layout
    _exchange: Exchange | None
    _result: list[Gradient] | None
    _rank: int | None  # whose part is under way
    _part: Flat | None  # the sum of its gradients

    def __init__(self, size: int) -> None:
        self._size = size
        self.abandon()

    def of(self, variables: Sequence[Variable], op: Any, compression: Any) -> None:
        """Say what steps have gradients of.

        Args:
            variables: the variables.
            op: ``hvd.Average`` or ``hvd.Sum``.
            compression: see `Layout`.

        Raises:
            ConfigError: virtual ranks cannot do that.
        """
        if op not in (hvd.Average, hvd.Sum):
            problem = "virtual ranks average gradients or sum them up; pass op=Average or op=Sum"
            raise ConfigError("op", problem)
        if not variables:
            raise ConfigError("variables", "there is nothing to train; pass variables=[...]")
        self._divisor = self._size if op == hvd.Average else 1
        self._layout = Layout(variables, compression)

    def begin(self, counts: Counts, process: int) -> None:
        """Begin a step."""
        self.abandon()
        name = f"{OURS}.virtual"
        missing = self._layout.missing

        def pack(bucket: int, number: int, flat: tf.Tensor | None) -> tf.Tensor:
            return missing[bucket]() if flat is None else flat

        self._exchange = Exchange(_Collectives(), name, counts, process, len(missing), operator.add, pack)
        # The variables whose gradients of this process were all finite.
        self._finite = np.ones(len(self._layout.variables), bool)

    def part_begins(self, rank: int) -> None:
        """Begin the part of a virtual rank."""
        self._rank, self._part = rank, None

    def add(self, gradients: Sequence[Gradient]) -> None:
        """Take gradients of the virtual rank that is being carried out; those of several calls are added up.

        Args:
            gradients: one for each variable; sparse ones are made dense, None adds nothing.

        Raises:
            StepError: none is being carried out, or there are more or fewer gradients than variables.
        """
        if self._rank is None:
            raise StepError("step.add()", "no virtual rank is being carried out; call it in the inner loop")
        given = [
            tf.convert_to_tensor(each) if isinstance(each, tf.IndexedSlices) else each for each in gradients
        ]
        if len(given) != len(self._layout.variables):
            raise StepError(
                "step.add()",
                f"{len(given)} gradients of {len(self._layout.variables)} variables; pass one for each of "
                "state.steps(..., variables=...), which are the model's trainable ones if it does not say",
            )
        there = [place for place, each in enumerate(given) if each is not None]
        if own.wanted and there:
            self._finite[there] &= np.isfinite(sums([given[place] for place in there]).numpy())
        flat = self._layout.packed(given)
        self._part = flat if self._part is None else self._layout.added(self._part, flat)

    def part_ends(self) -> None:
        """Add the gradients of the virtual rank to those before.

        Raises:
            StepError: the script has handed over none.
        """
        rank, part, self._rank, self._part = self._rank, self._part, None, None
        if part is None or rank is None:
            raise StepError(
                "state.steps()",
                f"virtual rank {rank} has no gradients in this step; hand them over in the inner loop: "
                "step.add(gradients)",
            )
        assert self._exchange is not None
        for bucket, flat in enumerate(self._layout.sent(part)):
            self._exchange.add(bucket, rank, flat)

    def finish(self) -> None:
        """Add up the sums of all processes.

        Raises:
            tf.errors.OpError: a process was lost.
        """
        assert self._exchange is not None
        self._result = self._layout.average(self._exchange.finish(), self._divisor)
        if own.wanted:
            own.found(tf.constant(self._finite), self._layout.variables)
        self._exchange = None

    def abandon(self) -> None:
        """Forget the step that is under way."""
        self._exchange = self._result = self._rank = self._part = None

    def result(self) -> list[Gradient]:
        """Return the gradients of the whole job, one for each variable; None where no virtual rank has one.

        Raises:
            StepError: the inner loop has not ended.
        """
        if self._result is None:
            raise StepError("step.gradients()", "they are there when the inner loop has ended")
        return list(self._result)


class _Collectives:
    """See `hvdrecover.virtual.exchange.Collectives`. Eager operations return when they are done."""

    exact: Collection[Any] = (tf.float32, tf.float64)

    def allreduce(self, flat: tf.Tensor, name: str) -> Done:
        return Done(hvd.allreduce(flat, op=hvd.Sum, name=name))

    def alltoall(self, flat: tf.Tensor, counts: Sequence[int], name: str) -> Done:
        received, _ = hvd.alltoall(_as_sent(flat), splits=tf.constant(counts, tf.int32), name=name)
        return Done(tf.bitcast(received, flat.dtype))

    def allgather(self, flat: tf.Tensor, name: str) -> Done:
        return Done(tf.bitcast(hvd.allgather(_as_sent(flat), name=name), flat.dtype))

    def joined(self, flats: Sequence[tf.Tensor]) -> tf.Tensor:
        return tf.concat(flats, 0)


def _as_sent(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor of a dtype that Horovod can send."""
    return tf.bitcast(tensor, tf.uint16) if tensor.dtype == tf.bfloat16 else tensor
