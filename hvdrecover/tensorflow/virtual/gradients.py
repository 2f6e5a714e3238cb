"""The gradients of the virtual ranks that a process carries out, summed up to those of the job."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdrecover.elastic.virtual.shares import Counts
from hvdrecover.elastic.virtual.tree import Node, RunningSum, pieces
from hvdrecover.errors import ConfigError, StepError
from hvdrecover.tensorflow.finite import each_finite
from hvdrecover.tensorflow.own_gradients import Gradient, own
from hvdrecover.tensorflow.variables import Variable, name_of, raw
from hvdrecover.tensorflow.virtual.exchange import NOTHING, Exchange

_DTYPES = (tf.float16, tf.bfloat16, tf.float32, tf.float64)
Flat = list[tf.Tensor]
"""The gradients of all variables one after the other: a tensor for each dtype."""


class Layout:
    """The places of gradients in a few flat tensors.

    The last elements of the first one are a number for each variable: how many gradients there are of it.

    Args:
        variables: of which there are gradients.
        compression: of ``hvd.Compression``; ``hvd.Compression.fp16`` adds up and sends float16.

    Attributes:
        kinds: dtype and length of each tensor.

    Raises:
        ConfigError: a variable's dtype, or the compression, is none that virtual ranks can add up.
    """

    def __init__(self, variables: Sequence[Variable], compression: Any) -> None:
        if compression not in (hvd.Compression.none, hvd.Compression.fp16):
            raise ConfigError(
                "compression",
                f"a sum of what {compression!r} makes would depend on the number of processes; pass "
                "Compression.none or Compression.fp16",
            )
        for each in variables:
            if raw(each).dtype not in _DTYPES:
                raise ConfigError(
                    "variables", f"{name_of(each)} is {raw(each).dtype.name}, which has no gradient"
                )
        self.variables = list(variables)
        self._halves = compression == hvd.Compression.fp16
        self._places: dict[tf.DType, list[int]] = {}
        for place, each in enumerate(variables):
            self._places.setdefault(raw(each).dtype, []).append(place)
        self._sizes = [int(raw(each).shape.num_elements()) for each in variables]
        self.kinds: list[tuple[tf.DType, int]] = []
        for number, (dtype, places) in enumerate(self._places.items()):
            length = sum(self._sizes[place] for place in places) + (0 if number else len(variables))
            self.kinds.append((tf.float16 if self._halves else dtype, length))
        self.packed = tf.function(self._packed, autograph=False)
        self.sent = tf.function(self._sent, autograph=False)
        self._unpacked = tf.function(self._taken_apart, autograph=False)

    def average(self, flat: Flat, divisor: int) -> list[Gradient]:
        """Return the gradients that are in flat tensors, divided; None where there was none at all."""
        wide = [tf.cast(each, dtype) for each, dtype in zip(flat, self._places, strict=True)]
        counts, gradients = self._unpacked(wide, [tf.constant(divisor, each.dtype) for each in wide])
        there = (counts.numpy() > 0).tolist()
        return [gradient if here else None for gradient, here in zip(gradients, there, strict=True)]

    def _packed(self, gradients: Sequence[Gradient]) -> Flat:
        """Flat tensors, in the variables' dtypes."""
        flat = []
        for number, (dtype, places) in enumerate(self._places.items()):
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
        return [tf.cast(each, dtype) for each, (dtype, _) in zip(flat, self.kinds, strict=True)]

    def _taken_apart(self, flat: Flat, divisors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
        counts = flat[0][-len(self.variables) :]
        gradients: dict[int, tf.Tensor] = {}
        for each, divisor, places in zip(flat, divisors, self._places.values(), strict=True):
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

    def __init__(self, size: int) -> None:
        self._size = size
        self._divisor = size
        self._layout: Layout | None = None
        self._step: _Step | None = None
        self._result: list[Gradient] | None = None

    def of(self, variables: Sequence[Variable], op: Any, compression: Any) -> None:
        """Say what steps have gradients of.

        Args:
            variables: the variables.
            op: ``hvd.Average`` or ``hvd.Sum``.
            compression: see `Layout`.

        Raises:
            ConfigError: virtual ranks can't do that.
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
        assert self._layout is not None
        self._result = None
        self._step = _Step(self._layout, pieces(counts), process, self._size)

    def part_begins(self, rank: int) -> None:
        """The part of a virtual rank begins."""
        assert self._step is not None
        self._step.rank, self._step.part = rank, None

    def add(self, gradients: Sequence[Gradient]) -> None:
        """Take gradients of the virtual rank that is being carried out; those of several calls are added up.

        Args:
            gradients: one for each variable; sparse ones are made dense, None adds nothing.

        Raises:
            StepError: none is being carried out, or there are more or fewer gradients than variables.
        """
        if self._step is None or self._step.rank is None:
            raise StepError("step.add()", "no virtual rank is being carried out; call it in the inner loop")
        self._step.add(gradients)

    def part_ends(self) -> None:
        """The part of a virtual rank has ended.

        Raises:
            StepError: it has handed over no gradients.
        """
        assert self._step is not None
        self._step.part_ends()

    def finish(self) -> None:
        """Add up the sums of all processes."""
        assert self._layout is not None and self._step is not None
        self._result = self._layout.average(self._step.totals(), self._divisor)
        if own.wanted:
            own.found(tf.constant(self._step.finite), self._layout.variables)
        self._step = None

    def abandon(self) -> None:
        """Forget the step that is under way."""
        self._step = self._result = None

    def result(self) -> list[Gradient]:
        """Return the gradients of the whole job, one for each variable; None of what no virtual rank has one.

        Raises:
            StepError: the inner loop has not ended.
        """
        if self._result is None:
            raise StepError("step.gradients()", "they are there when the inner loop has ended")
        return list(self._result)


class _Step:
    """The gradients of one step.

    Args:
        layout: of the gradients.
        nodes: the subtrees of each process.
        process: this one.
        size: number of virtual ranks.

    Attributes:
        rank: the virtual rank that is being carried out.
        part: the sum of its gradients.
        finite: of which variables all gradients of this process were finite.
    """

    def __init__(self, layout: Layout, nodes: Sequence[Sequence[Node]], process: int, size: int) -> None:
        self.rank: int | None = None
        self.part: Flat | None = None
        self.finite = np.ones(len(layout.variables), bool)
        self._layout = layout
        self._exchange = Exchange(nodes, process)
        # What is left in it at the end are the sums of this process's subtrees.
        self._sums = RunningSum[Flat](size, _added)

    def add(self, gradients: Sequence[Gradient]) -> None:
        """See `Gradients`."""
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
            self.finite[there] &= each_finite([given[place] for place in there]).numpy()
        flat = self._layout.packed(given)
        self.part = flat if self.part is None else _added(self.part, flat)

    def part_ends(self) -> None:
        """See `Gradients`."""
        rank, part, self.rank, self.part = self.rank, self.part, None, None
        if part is None or rank is None:
            raise StepError(
                "state.steps()",
                f"virtual rank {rank} has no gradients in this step; hand them over in the inner loop: "
                "step.add(gradients)",
            )
        self._sums.push(range(rank, rank + 1), self._layout.sent(part))

    def totals(self) -> Flat:
        """The sums over all processes."""
        return [
            self._exchange.total([each[number] for each in self._sums.values], dtype, length)
            for number, (dtype, length) in enumerate(self._layout.kinds)
        ]


@tf.function(autograph=False)  # type: ignore[untyped-decorator]
def _added(left: Flat, right: Flat) -> Flat:
    return [mine + other for mine, other in zip(left, right, strict=True)]
